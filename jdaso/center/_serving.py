"""The server's side of the network: frames in from any worker, answers out."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from typing import Any

import numpy as np

from jdaso.center import _protocol as protocol
from jdaso.center._presence import Presence
from jdaso.center._server import Server
from jdaso.exchange._messages import Waiting, Waits

# The server's tag; answers have tags of their own, from the next one on.
SERVER_TAG, ANSWER_TAGS = 0, 1 << 14
_LOOK_SECONDS = 0.2
# How long the last answers may take.
_LAST_SECONDS = 5.0


def answer_tag(question: int) -> int:
    """The tag of the answer to a question; so many may be open at once."""
    return 1 + question % ANSWER_TAGS


def serving(comm: Any, server: Server, presence: Presence) -> Waits:
    """Serves until all workers have ended or are gone.

    A worker that ends asks until nobody else is left, and is then told who is gone: MPI cannot be
    finalized without them.

    Args:
        comm: an mpi4py communicator over all workers, for this protocol alone.
        server: the centre.
        presence: who is there.
    """
    post = _Post(comm)
    told: set[int] = set()
    look_again, last = 0.0, math.inf
    while not (post.empty(presence.gone) and presence.over and told >= presence.ended):
        now, moved = time.monotonic(), False
        for worker, raw in post.arrived():
            moved = True
            presence.heard(worker, now)
            try:
                frame = protocol.unpacked(raw)
            except ValueError as error:  # whom to answer what, it does not say
                _say(f"rank {worker} sent {error}")
                continue
            if frame.kind == protocol.END:
                presence.ends(worker, failed=not frame.contributes)
                post.send(worker, _farewell(frame.question, presence))
                told |= {worker} if presence.over else set()
            elif frame.kind != protocol.ALIVE:
                for receiver, answer in server.take(worker, frame):
                    post.send(receiver, answer)
        if now > look_again:
            look_again = now + _LOOK_SECONDS
            for news in presence.look(now):
                _say(news)
            last = min(last, now + _LAST_SECONDS) if presence.over else math.inf
        if now > last:  # one that had ended died before it was told
            return
        yield Waiting(frozenset(), moved)


def _farewell(question: int, presence: Presence) -> np.ndarray:
    """To one that ends: None while others go on, then who is gone."""
    gone = sorted(presence.gone) if presence.over else None
    return protocol.packed(protocol.ANSWER, question, protocol.spoken(gone))


def _say(text: str) -> None:
    print(f"jdaso: center: {text}", file=sys.stderr, flush=True)


class _Post:
    """What is on its way to the server and from it."""

    def __init__(self, comm: Any):
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._arriving: list[tuple[int, np.ndarray, Any]] = []
        self._leaving: list[tuple[int, np.ndarray, Any]] = []

    def arrived(self) -> list[tuple[int, np.ndarray]]:
        """The frames that are complete, with who sent them."""
        status = self._mpi.Status()
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, SERVER_TAG, status)) is not None:
            frame = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._arriving.append((status.Get_source(), frame, message.Irecv(frame)))
        frames, pending = [], []
        for worker, frame, request in self._arriving:
            done = self._done(request)
            if done:
                frames.append((worker, frame))
            elif done is not None:
                pending.append((worker, frame, request))
        self._arriving = pending
        return frames

    def send(self, worker: int, frame: np.ndarray) -> None:
        """Sends an answer, without waiting."""
        tag = answer_tag(protocol.unpacked(frame).question)
        with contextlib.suppress(self._mpi.Exception):  # of one that has died
            self._leaving.append((worker, frame, self._comm.Isend(frame, dest=worker, tag=tag)))

    def empty(self, but: set[int]) -> bool:
        """Whether all has been sent, except what these workers do not take any more."""
        self._leaving = [entry for entry in self._leaving if self._done(entry[2]) is False]
        return all(worker in but for worker, _, _ in self._leaving)

    def _done(self, request: Any) -> bool | None:
        """Whether a message has crossed; None: it never will, as the worker has died."""
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return None
