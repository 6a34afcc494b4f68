"""Operations that outlive the death of a process: begun anew, unless all have agreed before."""

import queue
import time

import numpy as np
import pytest

from jdaso.exchange import _survivors as survivors
from jdaso.exchange._messages import Regrouped, Waiting
from jdaso.exchange._progress import Progress
from jdaso.exchange._staging import Spec, Staging


class Lost(Exception):
    """What MPI says of a dead process."""


@pytest.fixture(autouse=True)
def deaths(monkeypatch):
    monkeypatch.setattr(survivors, "is_loss", lambda error: isinstance(error, Lost))


class Comm:
    """A communicator whose agreements end when asked for the second time, or never."""

    def __init__(self, ends=True, others=()):
        self.ends, self.others, self.looks = ends, others, 0

    def Iagree(self, flags):
        assert flags.tolist() == [1]
        return self

    def Test(self):
        self.looks += 1
        return self.ends and self.looks > 1

    def Testany(self, requests):
        return 0, self.Test()

    def allgather(self, own):
        return [own, *self.others]


def ends_as(*results):
    """Makes operations that wait once, and return these in turn, or raise them."""
    left = list(results)

    def make():
        yield Waiting(frozenset({1}))
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return make


def result_of(operation):
    """What an operation returns, and for what it has waited."""
    waited = []
    while True:
        try:
            waited.append(next(operation))
        except StopIteration as end:
            return end.value, waited


def test_ends_when_all_have_agreed():
    result, waited = result_of(survivors.Agreements().lasting(ends_as("sum"), Comm, "line"))
    assert result == "sum"
    assert [waiting.lost for waiting in waited] == [False, False]


def test_after_a_death_it_begins_anew():
    operation = survivors.Agreements().lasting(ends_as(Lost(), "sum of the others"), Comm, "line")
    lost = [next(operation).lost for _ in range(3)]
    assert lost == [False, True, True]
    operation.throw(Regrouped())
    assert result_of(operation)[0] == "sum of the others"


def test_what_another_one_has_noticed_interrupts_it():
    operation = survivors.Agreements().lasting(ends_as("sum of the others"), Comm, "line")
    next(operation)
    assert operation.throw(Regrouped()) == Waiting(frozenset({1}))  # begun anew
    assert result_of(operation)[0] == "sum of the others"


def test_other_errors_are_raised():
    operation = survivors.Agreements().lasting(ends_as(OSError("full")), Comm, "line")
    with pytest.raises(OSError, match="full"):
        result_of(operation)


def test_what_another_one_has_seen_the_end_of_is_not_done_again():
    """The second of a line: all have agreed, but only the other has looked before a death."""
    agreements = survivors.Agreements()
    result_of(agreements.lasting(ends_as("first"), Comm, "line"))
    operation = agreements.lasting(ends_as("second", "of fewer"), lambda: Comm(ends=False), "line")
    next(operation), next(operation)
    agreements.share(Comm(others=[[("line", 1), ("line", 2)]]))
    with pytest.raises(StopIteration) as end:
        operation.throw(Regrouped())
    assert end.value.value == "second"


@pytest.mark.parametrize("seen", [[("line", 1)], [("other line", 2)], []])
def test_what_nobody_has_seen_the_end_of_is_done_again(seen):
    agreements = survivors.Agreements()
    result_of(agreements.lasting(ends_as("first"), Comm, "line"))
    comms = iter([Comm(ends=False), Comm()])
    operation = agreements.lasting(ends_as("second", "of fewer"), lambda: next(comms), "line")
    next(operation), next(operation)
    agreements.share(Comm(others=[seen]))
    operation.throw(Regrouped())
    assert result_of(operation)[0] == "of fewer"


class Alone:
    """One process, one that has died, and who brings together those that are left."""

    rank = 0
    describe = staticmethod("rank {}".format)
    dead = False

    def __init__(self):
        self.regrouped = 0

    def states(self, ranks):
        return str(sorted(ranks))

    def gone(self):
        if self.dead:
            raise Lost
        return frozenset()

    say = gone

    def survives(self, error):
        return isinstance(error, Lost)

    def regroup(self):
        self.regrouped += 1
        self.dead = False
        return self


@pytest.fixture
def alone():
    return Alone()


@pytest.fixture
def progress(alone):
    ends = queue.Queue()
    made = Progress(alone, 5.0, alone, ends.put, alone)
    yield made
    alone.dead = True  # and has no farewell to say
    made.close()
    assert ends.empty()


def test_the_thread_brings_together_those_that_are_left(progress, alone):
    agreements = survivors.Agreements()
    dies = agreements.lasting(ends_as(Lost(), "sum of the others"), Comm, "line")
    comms = iter([Comm(ends=False), Comm()])
    other = agreements.lasting(ends_as("not this", "but this"), lambda: next(comms), "other")
    waits = progress.submit(other, "another exchange")
    time.sleep(0.05)
    request = progress.submit(dies, "an exchange")
    assert progress.wait(request) == "sum of the others"
    assert alone.regrouped == 1
    assert progress.wait(waits) == "but this"


def test_a_death_that_no_operation_has_met_is_noticed(progress, alone):
    comms = iter([Comm(ends=False), Comm()])
    agreements = survivors.Agreements()
    waits = agreements.lasting(ends_as("not this", "but this"), lambda: next(comms), "line")
    request = progress.submit(waits, "an exchange")
    time.sleep(0.1)  # it is agreeing by now
    alone.dead = True
    assert progress.wait(request) == "but this"
    assert alone.regrouped == 1


def test_moved_memory_holds_the_same_leaves_and_leaves_the_old_to_who_writes_to_it():
    staging = Staging([Spec((3,), np.dtype("float32"))])
    staging.put([np.arange(3.0)])
    before, addresses, late = staging.leaves[0], staging.addresses, staging.sums[0]
    staging.move()
    late[:] = 7
    staging.sums[0][:] = 8
    assert staging.leaves[0].tolist() == before.tolist() == [0, 1, 2]
    assert staging.leaves[0] is not before
    assert late.tolist() == [7, 7, 7]
    assert staging.addresses.of_sums[0] == staging.sums[0].ctypes.data != addresses.of_sums[0]
    assert staging.addresses.of_sums[-1] == staging.record.ctypes.data
    assert staging.pairs[0][1][0] == 8
