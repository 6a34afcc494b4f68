"""The server's side of the network: receives the frames of all workers, and sends the replies."""

import contextlib
import math
import time

import numpy as np

from jdaso.center.server import frames
from jdaso.center.server.liveness import Liveness
from jdaso.center.server.state_machine import CenterServer
from jdaso.cluster.mpi_types import Comm, MpiRequest
from jdaso.core.log import logger
from jdaso.exchange.transport.progress import Operation, WaitState

# The tag of requests. Replies have the tags after it, one for each open request.
SERVER_TAG, REPLY_TAGS = 0, 1 << 14
_LIVENESS_SECONDS = 0.2
# The longest wait for the last replies.
_LAST_REPLIES_SECONDS = 5.0


def reply_tag(request: int) -> int:
    """The tag of the reply to a request. A worker has fewer than ``REPLY_TAGS`` open requests."""
    return 1 + request % REPLY_TAGS


def serve(comm: Comm, server: CenterServer, liveness: Liveness) -> Operation:
    """Serves until all workers have ended or are gone.

    A worker that ends repeats its request until no worker is active. The reply then names the
    workers that are gone, because MPI cannot be finalized without them.
    """
    mailbox = _Mailbox(comm)
    notified: set[int] = set()
    next_update, deadline = 0.0, math.inf
    while not (
        mailbox.all_sent(liveness.gone) and not liveness.active() and notified >= liveness.ended
    ):
        now, progressed = time.monotonic(), False
        for worker, message in mailbox.receive():
            progressed = True
            liveness.message_from(worker, now)
            try:
                frame = frames.unpack(message)
            except ValueError as error:  # the request to refuse is unknown
                logger.warning("center: what rank %d sent is ignored: %s", worker, error)
                continue
            if frame.kind == frames.END:
                liveness.set_ended(worker, failed=not frame.contributes)
                gone = None
                if not liveness.active():
                    gone = sorted(liveness.gone)
                    notified.add(worker)
                mailbox.send(worker, frames.pack(frames.REPLY, frame.request, frames.encode(gone)))
            elif frame.kind != frames.ALIVE:
                for receiver, reply in server.handle(worker, frame):
                    mailbox.send(receiver, reply)
        if now > next_update:
            next_update = now + _LIVENESS_SECONDS
            for change in liveness.update(now):
                logger.warning("center: %s", change)
            deadline = math.inf if liveness.active() else min(deadline, now + _LAST_REPLIES_SECONDS)
        if now > deadline:  # a worker that had ended died before it was notified
            return
        yield WaitState(progressed=progressed)


class _Mailbox:
    """The messages that the server is receiving and sending."""

    def __init__(self, comm: Comm):
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm
        self._receiving: list[tuple[int, np.ndarray, MpiRequest]] = []
        self._sending: list[tuple[int, np.ndarray, MpiRequest]] = []

    def receive(self) -> list[tuple[int, np.ndarray]]:
        """The complete messages, with their senders."""
        status = self._mpi.Status()
        while (message := self._comm.Improbe(self._mpi.ANY_SOURCE, SERVER_TAG, status)) is not None:
            buffer = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
            self._receiving.append((status.Get_source(), buffer, message.Irecv(buffer)))
        complete, pending = [], []
        for worker, buffer, request in self._receiving:
            done = self._done(request)
            if done:
                complete.append((worker, buffer))
            elif done is not None:
                pending.append((worker, buffer, request))
        self._receiving = pending
        return complete

    def send(self, worker: int, frame: np.ndarray) -> None:
        """Sends a reply without waiting."""
        tag = reply_tag(frames.unpack(frame).request)
        with contextlib.suppress(self._mpi.Exception):  # the worker has died
            self._sending.append((worker, frame, self._comm.Isend(frame, dest=worker, tag=tag)))

    def all_sent(self, ignored: set[int]) -> bool:
        """Whether all replies have been sent, except those to ``ignored`` workers."""
        self._sending = [entry for entry in self._sending if self._done(entry[2]) is False]
        return all(worker in ignored for worker, _, _ in self._sending)

    def _done(self, request: MpiRequest) -> bool | None:
        """Whether a message has been transferred; None if the worker has died."""
        try:
            return bool(request.Test())
        except self._mpi.Exception:
            return None
