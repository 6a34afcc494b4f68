"""The thread that moves exchanges: what is late, or was only stopped, and what nobody asks for."""

import queue
import time

import pytest

from jdaso import JdasoError
from jdaso.exchange import _progress
from jdaso.exchange._messages import Waiting
from jdaso.exchange._progress import Progress

TIMEOUT, PATIENCE = 0.5, 20.0


class Topology:
    """Two processes, of which the other says nothing."""

    rank = 0
    describe = staticmethod("rank {}".format)

    def states(self, ranks):
        return ", ".join(map(self.describe, sorted(ranks)))


class Farewell:
    """Nobody has ended."""

    def gone(self):
        return frozenset()

    def say(self):
        pass


@pytest.fixture
def ends():
    return queue.Queue()


@pytest.fixture
def progress(ends):
    made = Progress(Topology(), TIMEOUT, Farewell(), ends.put)
    yield made
    made.close()


def waiting_until(condition):
    while not condition():
        yield Waiting(frozenset({1}))
    return "done"


def test_what_is_late_is_an_error_that_names_who_is_missing(progress):
    begin = time.monotonic()
    request = progress.submit(waiting_until(lambda: False), "an exchange")
    with pytest.raises(JdasoError, match=r"an exchange did not end within 0.5 s: .* from rank 1"):
        progress.wait(request)
    assert time.monotonic() - begin >= TIMEOUT


def test_while_this_process_was_stopped_nothing_was_late(progress, monkeypatch):
    monkeypatch.setattr(_progress, "_PAUSE_SECONDS", TIMEOUT)
    looks = iter([False, True, True])

    def stopped():
        time.sleep(2 * TIMEOUT)  # as if the whole process were
        return next(looks)

    assert progress.wait(progress.submit(waiting_until(stopped), "an exchange")) == "done"


def test_an_error_that_nobody_asks_for_ends_the_job(progress, ends, monkeypatch):
    monkeypatch.setattr(_progress, "_UNTAKEN_SECONDS", 2 * TIMEOUT)
    progress.submit(waiting_until(lambda: False), "an exchange")
    reason = ends.get(timeout=PATIENCE)
    assert reason.startswith("rank 0 failed, while it waits for something else: an exchange did")
    assert ends.empty()


def test_an_error_that_was_taken_ends_nothing_more(progress, ends, monkeypatch):
    monkeypatch.setattr(_progress, "_UNTAKEN_SECONDS", 0.1)
    request = progress.submit(waiting_until(lambda: False), "an exchange")
    with pytest.raises(JdasoError):
        progress.wait(request)
    progress.wait(progress.submit(waiting_until(iter([False] * 50 + [True]).__next__), "another"))
    assert ends.empty()


class Message:
    """A message of MPI's, in what both of these ask of it."""

    def __init__(self):
        self.complete, self.questions = False, 0

    def Test(self):
        return self.complete

    def Testany(self, messages):
        self.questions += 1
        return 0, any(message.complete for message in messages)


def test_an_operation_is_asked_again_when_one_of_its_messages_is_complete(progress):
    first, second = Message(), Message()
    resumed = []

    def operation():
        while not first.Test() or not second.Test():
            resumed.append(first.questions)
            yield Waiting(frozenset({1}), requests=(first, second))
        return "done"

    request = progress.submit(operation(), "an exchange")
    while first.questions < 10:
        time.sleep(0.001)
    assert resumed == [0]
    second.complete = True
    while first.questions < 20:
        time.sleep(0.001)
    assert len(resumed) > 1
    first.complete = True
    assert progress.wait(request) == "done"


def test_an_error_of_a_message_is_that_of_its_operation(progress):
    class Broken(Message):
        def Testany(self, messages):
            raise RuntimeError("the link is down")

    def operation():
        yield Waiting(frozenset({1}), requests=(Broken(),))

    request = progress.submit(operation(), "an exchange")
    with pytest.raises(JdasoError, match="an exchange failed: RuntimeError: the link is down"):
        progress.wait(request)
