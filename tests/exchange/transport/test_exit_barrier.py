"""The barrier at exit: a process counts as exited once its last messages must have arrived."""

import numpy as np
import pytest

from jdaso.exchange.transport import exit_barrier
from jdaso.exchange.transport.exit_barrier import ExitBarrier

SIZE, RANK = 4, 1
PEERS = {0, 2, 3}


class Request:
    """An MPI request, which a test completes."""

    def __init__(self):
        self.complete = False

    def Test(self):
        return self.complete


class Comm:
    """Rank 1 of 4. Keeps what is sent, and the requests of what is expected, by rank."""

    def __init__(self):
        self.expected, self.sent = {}, {}

    def Get_size(self):
        return SIZE

    def Get_rank(self):
        return RANK

    def Irecv(self, buffer, source, tag):
        return self.expected.setdefault(source, Request())

    def Isend(self, buffer, dest, tag):
        self.sent[dest] = buffer
        request = Request()
        request.complete = True
        return request


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, in a list. Sleeping advances it."""
    now = [1000.0]
    monkeypatch.setattr(exit_barrier.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(exit_barrier.time, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    return now


def test_a_process_has_exited_only_when_its_earlier_messages_have_arrived(clock):
    comm = Comm()
    barrier = ExitBarrier(comm, str)
    assert set(comm.expected) == PEERS
    assert barrier.exited() == frozenset()
    comm.expected[2].complete = True
    assert barrier.exited() == frozenset()  # messages sent before may still arrive
    clock[0] += exit_barrier._GRACE_SECONDS / 2
    comm.expected[3].complete = True
    assert barrier.exited() == frozenset()
    clock[0] += exit_barrier._GRACE_SECONDS * 0.75
    assert barrier.exited() == {2}
    clock[0] += exit_barrier._GRACE_SECONDS
    assert barrier.exited() == {2, 3}


def test_announcing_waits_for_all_others_and_names_those_that_are_missing(clock, caplog):
    comm = Comm()

    def states(ranks):
        assert ranks == PEERS - {0}
        for request in comm.expected.values():
            request.complete = True
        return "ranks 2 and 3"

    barrier = ExitBarrier(comm, states)
    comm.expected[0].complete = True
    begin = clock[0]
    barrier.announce_exit()
    assert [type(sent) for sent in comm.sent.values()] == [np.ndarray] * len(PEERS)
    assert set(comm.sent) == PEERS
    assert clock[0] - begin >= exit_barrier._REMINDER_SECONDS
    assert [record.message for record in caplog.records] == ["at exit, waiting for ranks 2 and 3"]


def test_another_communicator_begins_without_the_announcements_of_the_first(clock):
    first, second = Comm(), Comm()
    barrier = ExitBarrier(first, str)
    first.expected[2].complete = True
    barrier.exited()
    barrier.connect(second, str)
    clock[0] += 2 * exit_barrier._GRACE_SECONDS
    assert barrier.exited() == frozenset()
    assert set(second.expected) == PEERS
