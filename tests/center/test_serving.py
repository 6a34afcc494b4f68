"""The server's loop, with mailboxes in the place of a network and a clock that is set."""

import types

import numpy as np
import pytest

from jdaso.center import _protocol as protocol
from jdaso.center import _serving
from jdaso.center._presence import Presence
from jdaso.center._protocol import ALIVE, ANSWER, END, READ, REFUSAL, packed, unpacked
from jdaso.center._server import Server
from jdaso.center._serving import SERVER_TAG, answer_tag, serving

MPI = pytest.importorskip("mpi4py.MPI")


class Done:
    """A request that is complete."""

    def Test(self):
        return True


class Mail:
    """A message that has been matched."""

    def __init__(self, frame):
        self.frame = frame

    def Irecv(self, buffer):
        buffer[:] = self.frame
        return Done()


class Mailbox:
    """The server's communicator."""

    def __init__(self):
        self.arriving, self.left = [], []

    def Improbe(self, source, tag, status):
        assert (source, tag) == (MPI.ANY_SOURCE, SERVER_TAG)
        if not self.arriving:
            return None
        worker, frame = self.arriving.pop(0)
        status.Set_source(worker)
        status.Set_elements(MPI.BYTE, len(frame))
        return Mail(frame)

    def Isend(self, frame, dest, tag):
        self.left.append((dest, unpacked(frame)))
        assert tag == answer_tag(unpacked(frame).question)
        return Done()


class Desk:
    """A server of three workers whose time stands still until it is set."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        clock = types.SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(_serving, "time", clock)
        self.mailbox = Mailbox()
        self.presence = Presence(3, "rank {}".format, gone_after=30, now=0)
        self.loop = serving(self.mailbox, Server(3, "rank {}".format), self.presence)
        self.questions = 0

    def sends(self, worker, kind, content=()):
        """What the worker is answered."""
        self.questions += 1
        self.mailbox.arriving.append((worker, packed(kind, self.questions, content)))
        next(self.loop)
        answers, self.mailbox.left = self.mailbox.left, []
        return [(to, read.kind, protocol.heard(read.content)) for to, read in answers]

    def over(self):
        return next(self.loop, "over") == "over"


@pytest.fixture
def desk(monkeypatch):
    return Desk(monkeypatch)


def test_who_ends_is_let_go_when_all_have_ended(desk):
    assert desk.sends(0, END) == [(0, ANSWER, None)]
    assert desk.sends(2, END) == [(2, ANSWER, None)]
    assert desk.sends(0, END) == [(0, ANSWER, None)]
    assert desk.sends(1, END) == [(1, ANSWER, [])]
    assert desk.sends(0, END) == [(0, ANSWER, [])]
    assert not desk.over()
    assert desk.sends(2, END) == [(2, ANSWER, [])]
    assert desk.over()


def test_who_is_silent_is_reported_and_not_waited_for(desk, capsys):
    desk.sends(0, END)
    desk.now = 20.0
    assert desk.sends(1, ALIVE) == []
    desk.now = 40.0
    assert desk.sends(0, END) == [(0, ANSWER, None)]
    assert desk.presence.gone == {2}
    assert "center: rank 2 has been silent for 30 s; the others go on" in capsys.readouterr().err
    assert desk.sends(1, END) == [(1, ANSWER, [2])]
    assert desk.sends(0, END) == [(0, ANSWER, [2])]
    assert desk.over()


def test_who_has_died_is_reported_at_once_and_does_not_come_back(desk, capsys):
    desk.presence.dies(2)
    desk.now = 1.0
    assert not desk.over()
    assert desk.presence.gone == {2}
    assert "center: rank 2 has died; the others go on" in capsys.readouterr().err
    desk.now = 2.0
    desk.sends(2, ALIVE)  # sent before
    assert desk.presence.gone == {2}
    assert desk.sends(0, END) == [(0, ANSWER, None)]
    assert desk.sends(1, END) == [(1, ANSWER, [2])]
    assert desk.sends(0, END) == [(0, ANSWER, [2])]
    assert desk.over()


def test_who_was_silent_may_come_back(desk, capsys):
    desk.now = 31.0
    desk.sends(0, ALIVE)
    assert desk.presence.gone == {1, 2}
    assert desk.sends(2, READ, protocol.spoken([]))[0][:2] == (2, REFUSAL)
    desk.now = 32.0
    desk.over()
    assert desk.presence.gone == {1}
    assert "rank 2 is back" in capsys.readouterr().err


def test_who_dies_before_it_is_let_go_is_not_waited_for_long(desk):
    for worker in range(3):
        desk.sends(worker, END)
    desk.sends(0, END)  # and rank 1 never asks again
    desk.now = 1.0
    assert not desk.over()
    desk.now = 10.0
    assert desk.over()


@pytest.mark.parametrize("frame", [np.zeros(0, np.uint8), np.full(100, 7, np.uint8)])
def test_what_is_no_message_is_said_and_forgotten(desk, capsys, frame):
    desk.mailbox.arriving.append((1, frame))
    assert not desk.over()
    assert f"center: rank 1 sent a message of {len(frame)} bytes" in capsys.readouterr().err
    assert desk.sends(1, END) == [(1, ANSWER, None)]
