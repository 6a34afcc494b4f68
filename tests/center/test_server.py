"""The server's loop, with a simulated network and a simulated clock."""

import types

import numpy as np
import pytest

from jdaso.center import server as module
from jdaso.center.frames import (
    ALIVE,
    END,
    READ,
    REFUSAL,
    REPLY,
    SERVER_TAG,
    pack,
    reply_tag,
    unpack,
)
from jdaso.center.server import CenterServer, serve

MPI = pytest.importorskip("mpi4py.MPI")


class CompleteRequest:
    """A request that is complete."""

    def Test(self):
        return True


class MatchedMessage:
    """A message that Improbe has returned."""

    def __init__(self, frame):
        self.frame = frame

    def Irecv(self, buffer):
        buffer[:] = self.frame
        return CompleteRequest()


class SimulatedComm:
    """The server's communicator."""

    def __init__(self):
        self.to_receive, self.sent = [], []

    def Improbe(self, source, tag, status):
        assert (source, tag) == (MPI.ANY_SOURCE, SERVER_TAG)
        if not self.to_receive:
            return None
        worker, frame = self.to_receive.pop(0)
        status.Set_source(worker)
        status.Set_elements(MPI.BYTE, len(frame))
        return MatchedMessage(frame)

    def Isend(self, frame, dest, tag):
        self.sent.append((dest, unpack(frame)))
        assert tag == reply_tag(unpack(frame).request)
        return CompleteRequest()


class SimulatedServer:
    """A server of three workers with a clock that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(module, "time", clock)
        self.comm = SimulatedComm()
        self.server = CenterServer(3, "rank {}".format, gone_after=30)
        self.loop = serve(self.comm, self.server)
        self.requests = 0

    def sends(self, worker, kind, content=False):
        """Handles a frame; returns receiver, kind and content of each reply."""
        self.requests += 1
        self.comm.to_receive.append((worker, pack(kind, self.requests, content)))
        next(self.loop)
        replies, self.comm.sent = self.comm.sent, []
        return [(to, reply.kind, reply.content()) for to, reply in replies]

    def finished(self):
        return next(self.loop, None) is None


@pytest.fixture
def server(monkeypatch):
    return SimulatedServer(monkeypatch)


def test_workers_may_exit_when_all_have_ended(server):
    assert server.sends(0, END) == [(0, REPLY, None)]
    assert server.sends(2, END) == [(2, REPLY, None)]
    assert server.sends(0, END) == [(0, REPLY, None)]
    assert server.sends(1, END) == [(1, REPLY, [])]
    assert server.sends(0, END) == [(0, REPLY, [])]
    assert not server.finished()
    assert server.sends(2, END) == [(2, REPLY, [])]
    assert server.finished()


def test_a_silent_worker_is_logged_and_not_waited_for(server, caplog):
    server.sends(0, END)
    server.now = 20.0
    assert server.sends(1, ALIVE) == []
    server.now = 40.0
    assert server.sends(0, END) == [(0, REPLY, None)]
    assert server.server.gone == {2}
    assert "center: rank 2 has been silent for 30 s; the others continue" in caplog.text
    assert server.sends(1, END) == [(1, REPLY, [2])]
    assert server.sends(0, END) == [(0, REPLY, [2])]
    assert server.finished()


def test_a_dead_worker_is_logged_at_once_and_does_not_come_back(server, caplog):
    server.server.died.add(2)
    server.now = 1.0
    assert not server.finished()
    assert server.server.gone == {2}
    assert "center: rank 2 has died; the others continue" in caplog.text
    server.now = 2.0
    server.sends(2, ALIVE)  # sent before its death
    assert server.server.gone == {2}
    assert server.sends(0, END) == [(0, REPLY, None)]
    assert server.sends(1, END) == [(1, REPLY, [2])]
    assert server.sends(0, END) == [(0, REPLY, [2])]
    assert server.finished()


def test_a_silent_worker_may_come_back(server, caplog):
    server.now = 31.0
    server.sends(0, ALIVE)
    assert server.server.gone == {1, 2}
    assert server.sends(2, READ, [])[0][:2] == (2, REFUSAL)
    server.now = 32.0
    server.finished()
    assert server.server.gone == {1}
    assert "rank 2 is back" in caplog.text


def test_a_worker_that_dies_before_it_may_exit_is_not_waited_for_long(server):
    for worker in range(3):
        server.sends(worker, END)
    server.sends(0, END)  # rank 1 never repeats its request
    server.now = 1.0
    assert not server.finished()
    server.now = 10.0
    assert server.finished()


NO_JSON = pack(END, 1, "text")
NO_JSON[-8] = 0


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (np.zeros(0, np.uint8), "a message of 0 bytes"),
        (np.full(100, 7, np.uint8), "a message of 100 bytes"),
        (NO_JSON, "the content of a message cannot be decoded"),
    ],
)
def test_a_malformed_message_is_logged_and_ignored(server, caplog, frame, problem):
    server.comm.to_receive.append((1, frame))
    assert not server.finished()
    assert f"center: what rank 1 sent is ignored: {problem}" in caplog.text
    assert server.sends(1, END) == [(1, REPLY, None)]


def test_a_silent_worker_that_ends_is_not_gone(caplog):
    server = CenterServer(2, "rank {}".format, gone_after=5)
    server.receive(0, pack(ALIVE, 0), now=6)
    server.update(now=6)
    assert "rank 1 has been silent for 5 s; the others continue" in caplog.text
    assert server.gone == {1}
    server.receive(1, pack(END, 0, True), now=6)
    caplog.clear()
    server.update(now=6)
    assert caplog.text == ""
    assert server.report() == {"workers": {0: 0, 1: 0}, "ended": [], "failed": [1], "gone": []}
    assert server.active() == {0}
