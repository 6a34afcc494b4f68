"""The progress thread: deadlines, suspended processes, and errors that nobody awaits."""

import gc
import queue
import time
import types
import weakref

import numpy as np
import pytest
from one_process import unsharded

from jdaso import JdasoError
from jdaso.cluster.roll_call import Absent, Answer, Call, RollCall
from jdaso.core.exchange import HEADER_SIZE
from jdaso.exchange.host.layout import LeafSpec
from jdaso.exchange.host.slots import Table
from jdaso.exchange.transport import progress as progress_module
from jdaso.exchange.transport.progress import Polling, Progress, WaitState

TIMEOUT, PATIENCE = 0.5, 20.0
HEADER = np.ones(HEADER_SIZE, np.float32)


class Topology:
    """Two processes. The other one sends nothing."""

    rank = 0
    heartbeat = None
    processes = tuple(types.SimpleNamespace(rank=rank) for rank in range(3))
    describe = staticmethod("rank {}".format)

    def states(self, ranks):
        return ", ".join(map(self.describe, sorted(ranks)))


@pytest.fixture
def aborts():
    return queue.Queue()


@pytest.fixture
def progress(aborts):
    made = Progress(Topology(), TIMEOUT, lambda progress: None, aborts.put)
    yield made
    made.close()


def test_what_programs_have_posted_comes_before_what_is_submitted_later(aborts):
    events = []

    class Exchanges:
        def take(self, slot):
            events.append("slot")
            table.done(slot, HEADER, 0, 0.0, 0.0)

        def log_completed(self):
            pass

    class Racing(Table):
        def next(self):
            """A program posts, and then the host submits, when the thread has found no slot."""
            if (found := super().next()) is None and not submitted:
                index = self.register(unsharded([LeafSpec((1,), np.dtype("float32"))]))
                self.end_post(self.begin_post(0, 0, HEADER, index))
                submitted.append(progress.submit(operation(), "the start of a run"))
            return found

    def operation():
        events.append("operation")
        yield from ()

    table, submitted = Racing(), []
    progress = Progress(Topology(), PATIENCE, lambda progress: None, aborts.put, table)
    progress.exchanges = Exchanges()
    table.wake()
    progress.submit(iter(()), "nothing").done.wait(PATIENCE)
    assert submitted[0].done.wait(PATIENCE)
    progress.close()
    assert events == ["slot", "operation"]


def test_only_the_exit_of_a_process_that_is_missing_fails_an_operation(monkeypatch, aborts):
    calls = RollCall(0, on_question=lambda: None)
    monkeypatch.setattr(
        Topology, "heartbeat", types.SimpleNamespace(roll_call=calls, describe="rank {}".format)
    )
    call, left = calls.post(calls.new_series([0, 1])), []
    progress = Progress(Topology(), PATIENCE, left.append, aborts.put)
    running, exited = (Absent(1, closed, None, "") for closed in (False, True))
    calls.answers = {call: Answer(2, 1, (running,))}
    looks = iter([False] * 5 + [True])
    submitted = progress.submit(waiting_until(lambda: next(looks)), "an exchange", call=call)
    assert progress.wait(submitted) == "done"
    calls.answers = {call: Answer(2, 1, (exited,))}
    with pytest.raises(JdasoError, match="an exchange cannot complete: rank 1 closed this"):
        progress.wait(progress.submit(waiting_until(lambda: False), "an exchange", call=call))
    progress.close()
    assert left == [progress]


def test_a_wait_while_devices_are_busy_is_no_deadlock(monkeypatch, aborts):
    monkeypatch.setattr(progress_module, "_DEADLOCK_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "_ASK_SECONDS", 0.0)
    monkeypatch.setattr(progress_module, "_BUSY_SECONDS", 0.05)
    calls = RollCall(0, on_question=lambda: None)
    monkeypatch.setattr(
        Topology, "heartbeat", types.SimpleNamespace(roll_call=calls, describe="rank {}".format)
    )
    call, others = calls.post(calls.new_series([0, 1])), calls.new_series([0, 1])
    progress = Progress(Topology(), PATIENCE, lambda progress: None, aborts.put)
    # The other process waits for something that this one has not posted.
    calls.answers = {call: Answer(2, 1, (Absent(1, False, Call(others, 0), "a consensus"),))}

    def wait(busy, looks):
        done = iter([False] * looks + [True]).__next__
        return progress.wait(progress.submit(waiting_until(done), "a flag", call=call), busy)

    assert wait(lambda: True, looks=50) == "done"
    assert not calls.answer_to(Call(call.series, 1)).names[0].awaited
    for busy in (None, iter([True, True, False]).__next__):  # then the devices are done
        with pytest.raises(JdasoError, match=r"a flag cannot complete: rank 1 .*a consensus"):
            wait(busy, looks=10**6)
        assert not calls.answer_to(Call(call.series, 1)).names[0].awaited
    progress.close()


def test_the_last_operation_runs_while_closing_and_may_take_longer_than_others(aborts):
    begin, results = time.monotonic(), []

    def late():
        yield from waiting_until(lambda: time.monotonic() - begin > 2 * TIMEOUT)
        results.append("all exit")

    def announce_exit(progress):
        progress.submit(late(), "the exit", last=True).done.wait()

    progress = Progress(Topology(), TIMEOUT, announce_exit, aborts.put)
    progress.close()
    assert results == ["all exit"]
    with pytest.raises(JdasoError, match="the exchange is closed"):
        progress.submit(late(), "an exchange")
    assert not progress._thread.is_alive()


def test_an_error_that_nobody_has_awaited_at_exit_aborts_the_job(aborts):
    progress = Progress(Topology(), TIMEOUT, lambda progress: None, aborts.put)
    request = progress.submit(waiting_until(lambda: False), "an exchange")
    assert request.done.wait(PATIENCE)
    progress.close()
    reason = aborts.get(timeout=PATIENCE)
    assert "exit with an exchange in flight that cannot complete: an exchange did not" in reason


def test_a_thread_that_has_ended_fails_what_is_posted_and_ends_the_job_at_the_close(aborts):
    class Exchanges:
        def take(self, slot):
            raise MemoryError("no memory")

    table = Table()
    progress = Progress(Topology(), PATIENCE, lambda progress: None, aborts.put, table)
    index = table.register(unsharded([LeafSpec((1,), np.dtype("float32"))]))
    for number in range(2):
        table.end_post(table.begin_post(number, 0, HEADER, index))
    progress.exchanges = Exchanges()
    table.wake()
    progress._thread.join(PATIENCE)
    assert not progress._thread.is_alive()
    with pytest.raises(JdasoError, match="MemoryError: no memory"):
        table.await_done()
    assert aborts.empty()
    progress.close()
    reason = aborts.get(timeout=PATIENCE)
    assert "the thread of an exchange has failed with MemoryError: no memory" in reason


def waiting_until(condition):
    while not condition():
        yield WaitState(frozenset({1}))
    return "done"


def test_an_error_after_the_deadline_names_the_missing_rank(progress):
    begin = time.monotonic()
    request = progress.submit(waiting_until(lambda: False), "an exchange")
    with pytest.raises(
        JdasoError, match=r"an exchange did not complete within 0.5 s: .* from rank 1"
    ):
        progress.wait(request)
    assert time.monotonic() - begin >= TIMEOUT


def test_an_error_after_the_deadline_names_those_that_have_exited(monkeypatch, aborts):
    heartbeat = types.SimpleNamespace(
        roll_call=RollCall(0, on_question=lambda: None),
        silent_ranks=frozenset,
        exited_ranks=lambda: frozenset({1}),
        describe="rank {}".format,
        states=lambda ranks: f"{sorted(ranks)} (has exited)",
    )
    monkeypatch.setattr(Topology, "heartbeat", heartbeat)
    progress = Progress(Topology(), TIMEOUT, lambda progress: None, aborts.put)

    def waiting():
        while True:
            yield WaitState()

    with pytest.raises(JdasoError, match=r"nothing came from \[1\] \(has exited\)"):
        progress.wait(progress.submit(waiting(), "an exchange"))
    progress.close()


@pytest.mark.parametrize(
    ("answered", "missing"),
    [(1, "the network: all processes have posted it"), (0, r"other processes \(unknown which\)")],
)
def test_the_network_is_late_only_if_all_have_posted_this_operation(
    monkeypatch, aborts, answered, missing
):
    """Answers about an earlier operation do not tell who has posted this one."""
    calls = RollCall(0, on_question=lambda: None)
    heartbeat = types.SimpleNamespace(
        roll_call=calls,
        silent_ranks=frozenset,
        exited_ranks=frozenset,
        describe="rank {}".format,
    )
    monkeypatch.setattr(Topology, "heartbeat", heartbeat)
    series = calls.new_series([0, 1])
    posted = [calls.post(series) for _ in range(2)]
    calls.answers = {posted[answered]: Answer(len(Topology.processes))}
    progress = Progress(Topology(), TIMEOUT, lambda progress: None, aborts.put)

    def waiting():
        while True:
            yield WaitState()

    with pytest.raises(JdasoError, match=f"nothing came from {missing}"):
        progress.wait(progress.submit(waiting(), "an exchange", call=posted[1]))
    progress.close()


def test_time_in_which_the_process_was_stopped_does_not_count(progress, monkeypatch):
    monkeypatch.setattr(progress_module, "_SUSPENDED_SECONDS", TIMEOUT)
    looks = iter([False, True, True])

    def stopped():
        time.sleep(2 * TIMEOUT)  # as if the whole process were stopped
        return next(looks)

    assert progress.wait(progress.submit(waiting_until(stopped), "an exchange")) == "done"


def test_buffers_of_a_failed_operation_outlive_its_exchange(aborts):
    def waiting(buffer):
        while True:
            yield WaitState(frozenset({1}))

    buffer = np.empty(1)
    alive = weakref.ref(buffer)
    progress = Progress(Topology(), TIMEOUT, lambda progress: None, aborts.put)
    with pytest.raises(JdasoError):
        progress.wait(progress.submit(waiting(buffer), "an exchange"))
    progress.close()
    del progress, buffer
    gc.collect()
    assert alive() is not None


def test_an_error_that_nobody_awaits_aborts_the_job(progress, aborts, monkeypatch):
    monkeypatch.setattr(progress_module, "_UNAWAITED_SECONDS", 2 * TIMEOUT)
    progress.submit(waiting_until(lambda: False), "an exchange")
    reason = aborts.get(timeout=PATIENCE)
    assert reason.startswith("rank 0 failed, and its program does not wait for the result: an ")
    assert aborts.empty()


def test_an_error_that_was_awaited_does_not_abort_the_job(progress, aborts, monkeypatch):
    monkeypatch.setattr(progress_module, "_UNAWAITED_SECONDS", 0.1)
    request = progress.submit(waiting_until(lambda: False), "an exchange")
    with pytest.raises(JdasoError):
        progress.wait(request)
    progress.wait(progress.submit(waiting_until(iter([False] * 50 + [True]).__next__), "another"))
    assert aborts.empty()


class Message:
    """An MPI request."""

    def __init__(self):
        self.complete, self.polls = False, 0

    def Test(self):
        return self.complete

    def Testany(self, messages):
        self.polls += 1
        return 0, any(message.complete for message in messages)


def test_an_operation_continues_when_one_of_its_messages_is_complete(progress):
    first, second = Message(), Message()
    resumed = []

    def operation():
        while not first.Test() or not second.Test():
            resumed.append(first.polls)
            yield WaitState(frozenset({1}), requests=(first, second))
        return "done"

    request = progress.submit(operation(), "an exchange")
    while first.polls < 10:
        time.sleep(0.001)
    assert resumed == [0]
    second.complete = True
    while first.polls < 20:
        time.sleep(0.001)
    assert len(resumed) > 1
    first.complete = True
    assert progress.wait(request) == "done"


def messages_of(message):
    while not message.Test():
        yield WaitState(requests=(message,))
    return "done"


def test_deadlines_are_looked_at_while_no_message_is_complete(progress):
    message = Message()
    request = progress.submit(messages_of(message), "an exchange")
    with pytest.raises(JdasoError, match=r"an exchange did not complete within 0.5 s"):
        progress.wait(request)
    assert message.polls > 10


def test_a_new_operation_begins_while_no_message_of_another_one_is_complete(aborts, monkeypatch):
    monkeypatch.setattr(progress_module, "_LOOK_SECONDS", PATIENCE)
    progress = Progress(Topology(), PATIENCE, lambda progress: None, aborts.put)
    message, another = Message(), Message()
    request = progress.submit(messages_of(message), "an exchange")
    while message.polls < 10:
        time.sleep(0.001)
    another.complete = True
    assert progress.submit(messages_of(another), "another").done.wait(PATIENCE / 2)
    message.complete = True
    assert progress.wait(request) == "done"
    progress.close()


def test_a_short_wait_beside_a_stalled_operation_is_polled_often(monkeypatch, aborts):
    pauses, pause = [], Polling.pause
    monkeypatch.setattr(
        Polling, "pause", lambda *a, **k: pauses.append(pause(*a, **k)) or pauses[-1]
    )
    progress = Progress(Topology(), PATIENCE, lambda progress: None, aborts.put)
    stalled = Message()
    exchange = progress.submit(waiting_until(stalled.Test), "an exchange")
    time.sleep(0.1)
    pauses.clear()
    until = time.monotonic() + PATIENCE / 2
    while not pauses or min(pauses) > 1e-3:
        assert time.monotonic() < until
        done = iter([False] * 5 + [True]).__next__
        progress.wait(progress.submit(waiting_until(done), "a flag"))
    stalled.complete = True
    progress.wait(exchange)
    progress.close()


def test_an_error_of_a_message_fails_its_operation(progress):
    class Broken(Message):
        def Testany(self, messages):
            raise RuntimeError("the link is down")

    def operation():
        yield WaitState(frozenset({1}), requests=(Broken(),))

    message = Message()
    beside = progress.submit(messages_of(message), "another")
    request = progress.submit(operation(), "an exchange")
    with pytest.raises(JdasoError, match="an exchange failed: RuntimeError: the link is down"):
        progress.wait(request)
    message.complete = True
    assert progress.wait(beside) == "done"
