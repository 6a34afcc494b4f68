"""A barrier at exit. Processes announce that they exit, so that no peer waits for them."""

import time
from collections.abc import Callable

import numpy as np

from jdaso.core.log import logger
from jdaso.core.mpi_types import Comm, MpiRequest

_TAG = 0
# Messages that a process sent before its announcement may arrive after it.
_GRACE_SECONDS = 5.0
_REMINDER_SECONDS = 60.0


class ExitBarrier:
    """Sends one byte from every process to every other process when it exits.

    Only collectives use ``comm`` as well. ``states(ranks)`` names ranks and tells whether each is
    alive.
    """

    def __init__(self, comm: Comm, states: Callable[[frozenset[int]], str]):
        # Bytes of earlier communicators may still arrive in the buffers posted for them.
        self._kept: list[dict[int, np.ndarray]] = []
        self.connect(comm, states)

    def connect(self, comm: Comm, states: Callable[[frozenset[int]], str]) -> None:
        """Continues over another communicator; the arguments are those of the class."""
        self.comm = comm
        self._states = states
        peers = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._bytes = {rank: np.zeros(1, np.uint8) for rank in peers}
        self._kept.append(self._bytes)
        self._expected: dict[int, MpiRequest] = {
            rank: comm.Irecv(buffer, source=rank, tag=_TAG) for rank, buffer in self._bytes.items()
        }
        self._announced_at: dict[int, float] = {}

    def exited(self) -> frozenset[int]:
        now = time.monotonic()
        for rank in [rank for rank, request in self._expected.items() if request.Test()]:
            del self._expected[rank]
            self._announced_at[rank] = now
        return frozenset(r for r, at in self._announced_at.items() if now - at > _GRACE_SECONDS)

    def announce_exit(self) -> None:
        """Announces that this process exits, and waits until all others exit as well.

        MPI_Finalize also waits for them, but occupies a core meanwhile. If one of them dies
        instead, the heartbeat ends this process.
        """
        own = np.zeros(1, np.uint8)
        sends = [self.comm.Isend(own, dest=rank, tag=_TAG) for rank in self._bytes]
        remind_at = time.monotonic() + _REMINDER_SECONDS
        while self._expected or not all(send.Test() for send in sends):
            self.exited()
            time.sleep(1e-3)
            if time.monotonic() > remind_at:
                remind_at += _REMINDER_SECONDS
                states = self._states(frozenset(self._expected))
                logger.warning("at exit, waiting for %s", states)
