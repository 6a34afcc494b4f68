"""A worker's line to the server: questions and their answers, signs of life, and the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdaso._base import JdasoError
from jdaso.center import _protocol as protocol
from jdaso.center._serving import SERVER_TAG, answer_tag
from jdaso.exchange._messages import Waiting, Waits
from jdaso.exchange._progress import Progress
from jdaso.exchange._request import Request
from jdaso.topology import Topology

_ASK_AGAIN_SECONDS = 0.1


class Line:
    """To the server, and nobody else; at exit it waits until all workers have ended.

    Args:
        topology: who the others are.
        comm: an mpi4py communicator over all workers, for this protocol alone.
        timeout: seconds after which a question without an answer is an error.
        beat: seconds between two signs of life.
        end: ``(reason)``, ends this worker at exit, if what it has asked is not answered.
        leave: ``(gone)``, called at the end with the workers that are gone.
        failed: whether this worker ends by an exception.
    """

    def __init__(
        self,
        topology: Topology,
        comm: Any,
        timeout: float,
        beat: float,
        end: Callable[[str], None],
        leave: Callable[[Sequence[int]], None],
        failed: Callable[[], bool],
    ):
        self._comm = comm
        self._timeout = timeout
        self._end = end
        self._server = topology.describe(protocol.SERVER)
        self._leave = leave
        self._failed = failed
        self._questions = 0
        self._ended = threading.Event()
        self._progress = Progress(topology, timeout, self, end)
        self._living = threading.Thread(
            target=self._live, args=(beat,), name="jdaso-alive", daemon=True
        )
        self._living.start()

    def submit(
        self,
        kind: int,
        what: str,
        parts: Sequence[np.ndarray],
        contributes: bool = True,
        fingerprint: int = 0,
    ) -> Request:
        """Asks; returns at once."""
        asked = self._asked(kind, parts, contributes, fingerprint)
        return self._progress.submit(asked, what, regular=kind == protocol.EXCHANGE)

    def wait(self, request: Request) -> np.ndarray:
        """The content of an answer.

        Raises:
            JdasoError: if the server refuses, or does not answer in time.
        """
        return self._progress.wait(request)

    def timed(self, request: Request) -> tuple[np.ndarray, float]:
        """The same, with the seconds that were waited for it."""
        since = time.monotonic()
        return self.wait(request), time.monotonic() - since

    def gone(self) -> frozenset[int]:
        """Nobody: the server outlives its workers."""
        return frozenset()

    def say(self) -> None:
        """Tells the server that this worker ends, and waits until all have."""
        while (gone := self._farewell()) is None:
            time.sleep(_ASK_AGAIN_SECONDS)
        self._ended.set()
        self._living.join()
        self._leave(gone)

    def _farewell(self) -> list[int] | None:
        """Who is gone, once nobody else is left."""
        asked = self._asked(protocol.END, (), not self._failed(), 0)
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            try:
                next(asked)
            except StopIteration as end:
                return protocol.heard(end.value)
            time.sleep(1e-3)
        self._end(
            f"exit without the centre: {self._server} has not answered for {self._timeout:g} s."
        )
        return []

    def _asked(
        self, kind: int, parts: Sequence[np.ndarray], contributes: bool, fingerprint: int
    ) -> Waits:
        """Sends a frame and waits for its answer; returns the answer's content."""
        from mpi4py import MPI

        # Operations are moved by one thread, whichever it is.
        self._questions += 1
        tag, status = answer_tag(self._questions), MPI.Status()
        frame = protocol.packed(kind, self._questions, parts, contributes, fingerprint)
        sent = self._comm.Isend(frame, dest=protocol.SERVER, tag=SERVER_TAG)
        while (message := self._comm.Improbe(protocol.SERVER, tag, status)) is None:
            sent.Test()
            yield Waiting(frozenset({protocol.SERVER}))
        answer = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        received = message.Irecv(answer)
        while not (received.Test() and sent.Test()):
            yield Waiting(frozenset({protocol.SERVER}), moved=True)
        read = protocol.unpacked(answer)
        if read.kind == protocol.REFUSAL:
            raise JdasoError(protocol.heard(read.content))
        return read.content

    def _live(self, beat: float) -> None:
        """Gives signs of life, also while the program computes."""
        frame = protocol.packed(protocol.ALIVE, 0)
        while not self._ended.wait(beat):
            sent = self._comm.Isend(frame, dest=protocol.SERVER, tag=SERVER_TAG)
            while not (sent.Test() or self._ended.wait(beat)):
                pass
