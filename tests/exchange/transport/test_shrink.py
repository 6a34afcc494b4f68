"""Operations are repeated after the death of a process, unless all have agreed before."""

import dataclasses
import queue
import threading
import time

import numpy as np
import pytest

import jdaso
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.layout import LeafSpec
from jdaso.exchange.transport import shrink
from jdaso.exchange.transport.operation import Repaired, WaitState
from jdaso.exchange.transport.progress import Progress


class Lost(Exception):
    """The error that MPI raises for a dead process."""


@pytest.fixture(autouse=True)
def deaths(monkeypatch):
    monkeypatch.setattr(shrink, "is_process_failure", lambda error: isinstance(error, Lost))


class Comm:
    """A communicator whose agreements complete at the second poll, or never."""

    def __init__(self, completes=True, others=()):
        self.completes, self.others, self.polls = completes, others, 0

    def Iagree(self, flags):
        assert flags.tolist() == [1]
        return self

    def Test(self):
        self.polls += 1
        return self.completes and self.polls > 1

    def Testany(self, requests):
        return 0, self.Test()

    def allgather(self, own):
        return [own, *self.others]


def returning(*results):
    """Creates operations that wait once, and then return or raise these results in turn."""
    left = list(results)

    def make():
        yield WaitState(frozenset({1}))
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return make


def result_of(operation):
    """The result of an operation, and the states in which it has waited."""
    waited = []
    while True:
        try:
            waited.append(next(operation))
        except StopIteration as end:
            return end.value, waited


def test_an_operation_is_complete_when_all_have_agreed():
    result, waited = result_of(
        shrink.CompletionLog().until_complete(returning("sum"), Comm, "queue")
    )
    assert result == "sum"
    assert [state.needs_repair for state in waited] == [False, False]


def test_an_operation_is_repeated_after_a_death():
    operation = shrink.CompletionLog().until_complete(
        returning(Lost(), "sum of the others"), Comm, "queue"
    )
    lost = [next(operation).needs_repair for _ in range(3)]
    assert lost == [False, True, True]
    operation.throw(Repaired())
    assert result_of(operation)[0] == "sum of the others"


def test_a_repair_interrupts_an_operation():
    operation = shrink.CompletionLog().until_complete(returning("sum of the others"), Comm, "queue")
    next(operation)
    assert operation.throw(Repaired()) == WaitState(frozenset({1}))  # repeated
    assert result_of(operation)[0] == "sum of the others"


def test_other_errors_are_raised():
    operation = shrink.CompletionLog().until_complete(returning(OSError("full")), Comm, "queue")
    with pytest.raises(OSError, match="full"):
        result_of(operation)


def test_an_operation_that_is_complete_elsewhere_is_not_repeated():
    """All have agreed on the second of a queue, and only the other has seen it before a death."""
    log = shrink.CompletionLog()
    result_of(log.until_complete(returning("first"), Comm, "queue"))
    operation = log.until_complete(
        returning("second", "of fewer"), lambda: Comm(completes=False), "queue"
    )
    next(operation), next(operation)
    log.share(Comm(others=[[("queue", 1), ("queue", 2)]]))
    with pytest.raises(StopIteration) as end:
        operation.throw(Repaired())
    assert end.value.value == "second"


@pytest.mark.parametrize("seen", [[("queue", 1)], [("other queue", 2)], []])
def test_an_operation_that_is_complete_nowhere_is_repeated(seen):
    log = shrink.CompletionLog()
    result_of(log.until_complete(returning("first"), Comm, "queue"))
    comms = iter([Comm(completes=False), Comm()])
    operation = log.until_complete(returning("second", "of fewer"), lambda: next(comms), "queue")
    next(operation), next(operation)
    log.share(Comm(others=[seen]))
    operation.throw(Repaired())
    assert result_of(operation)[0] == "of fewer"


class Shrinking:
    """A communicator of one process. Its ``Dup`` fails for each death that is left."""

    def __init__(self, deaths, log):
        self.deaths, self.log = deaths, log

    def Revoke(self):
        self.log.append("Revoke")

    def Shrink(self):
        self.log.append("Shrink")
        return self

    def allgather(self, own):
        return [own]

    def Dup(self):
        self.log.append("Dup")
        if self.deaths:
            raise self.deaths.pop()
        return self

    def Agree(self, flag):
        return flag


def repaired(deaths):
    """What a repair calls, where the creation of a communicator raises these errors in turn."""
    calls = []
    topology = dataclasses.replace(jdaso.discover_topology(), comm=Shrinking(deaths, calls))
    watchdog = shrink.RepairWatchdog(20)
    shrink.repair(topology, [], lambda remaining: remaining.duplicate_comm(), watchdog)
    return calls


def test_a_death_during_the_reconnection_is_repaired_as_well():
    once = ["Revoke", "Shrink", "Dup"]
    assert repaired([]) == once
    # A process whose Dup has failed revokes, or the others would wait for it.
    assert repaired([Lost(), Lost()]) == 2 * [*once, "Revoke"] + once


def test_other_errors_of_the_reconnection_are_raised():
    with pytest.raises(jdaso.JdasoError, match="cannot create another communicator: full"):
        repaired([OSError("full")])


class Alone:
    """One remaining process: its topology and its recovery."""

    rank = 0
    heartbeat = None
    describe = staticmethod("rank {}".format)
    dead = False

    def __init__(self):
        self.repairs = 0

    def states(self, ranks):
        return str(sorted(ranks))

    def needs_repair(self):
        return self.dead

    def repair(self):
        self.repairs += 1
        self.dead = False
        return self


@pytest.fixture
def alone():
    return Alone()


@pytest.fixture
def progress(alone):
    aborts, log = queue.Queue(), shrink.CompletionLog()

    def announce_exit(progress):  # at which the other process dies
        before = alone.repairs
        barrier = log.until_complete(returning(Lost(), "all exit"), Comm, "exits")
        progress.submit(barrier, "the exit", last=True).done.wait()
        assert alone.repairs == before + 1

    made = Progress(alone, 5.0, announce_exit, aborts.put, alone)
    yield made
    made.close()
    assert aborts.empty()


def test_the_thread_repairs_once_and_restarts_all_operations(progress, alone):
    log = shrink.CompletionLog()
    dies = log.until_complete(returning(Lost(), "sum of the others"), Comm, "queue")
    comms = iter([Comm(completes=False), Comm()])
    other = log.until_complete(returning("not this", "but this"), lambda: next(comms), "other")
    waits = progress.submit(other, "another exchange")
    time.sleep(0.05)
    request = progress.submit(dies, "an exchange")
    assert progress.wait(request) == "sum of the others"
    assert alone.repairs == 1
    assert progress.wait(waits) == "but this"


def test_a_death_that_no_operation_has_met_is_found(progress, alone):
    comms = iter([Comm(completes=False), Comm()])
    log = shrink.CompletionLog()
    waits = log.until_complete(returning("not this", "but this"), lambda: next(comms), "queue")
    request = progress.submit(waits, "an exchange")
    time.sleep(0.1)  # until it agrees
    alone.dead = True
    assert progress.wait(request) == "but this"
    assert alone.repairs == 1


def test_a_repair_that_takes_too_long_aborts_the_job_from_a_thread_that_exists(monkeypatch):
    """The interpreter starts no thread at exit, when a process may die as well."""
    reasons = queue.Queue()

    class Before:
        rank, abort, describe = 0, staticmethod(reasons.put), staticmethod("rank {}".format)

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    watchdog, slow = shrink.RepairWatchdog(20), shrink.RepairWatchdog(0.1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with watchdog.watch(Before()):
        pass
    with slow.watch(Before()):
        reason = reasons.get(timeout=20)
    assert reason.startswith("rank 0 failed: the repair after the death of a process took more")
    assert reasons.empty()


def test_reallocated_buffers_hold_the_same_leaves_and_late_writes_go_to_the_old_ones():
    staging = StagingBuffers([LeafSpec((3,), np.dtype("float32"))])
    staging.fill([np.arange(3.0)])
    before, places, late = staging.leaves[0], staging.places, staging.sums[0]
    staging.reallocate()
    late[:] = 7
    staging.sums[0][:] = 8
    assert staging.leaves[0].tolist() == before.tolist() == [0, 1, 2]
    assert staging.leaves[0] is not before
    assert late.tolist() == [7, 7, 7]
    sums = staging.places.of_sums["address"]
    assert sums[0] == staging.sums[0].ctypes.data != places.of_sums["address"][0]
    assert sums[-1] == staging.record.ctypes.data
    assert staging.pairs[0][1][0] == 8
