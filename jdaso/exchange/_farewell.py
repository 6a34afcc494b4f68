"""Processes that have ended their run say so, and nobody waits for them in vain."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_TAG = 0
# What a process sent before it said farewell may arrive after it.
_GRACE_SECONDS = 5.0
_REMINDER_SECONDS = 60.0


class Farewell:
    """One byte from every process to every other, sent when it exits.

    Args:
        comm: an mpi4py communicator over all processes that nobody else uses.
        states: names ranks, and says of each whether it is alive.
    """

    def __init__(self, comm: Any, states: Callable[[frozenset[int]], str]):
        # What others have not said yet may still arrive where it was expected.
        self._kept: list[dict[int, np.ndarray]] = []
        self.join(comm, states)

    def join(self, comm: Any, states: Callable[[frozenset[int]], str]) -> None:
        """From now on these are the others; arguments as above."""
        self.comm = comm
        self._states = states
        peers = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        self._bytes = {rank: np.zeros(1, np.uint8) for rank in peers}
        self._kept.append(self._bytes)
        self._expected = {
            rank: comm.Irecv(buffer, source=rank, tag=_TAG) for rank, buffer in self._bytes.items()
        }
        self._heard: dict[int, float] = {}

    def gone(self) -> frozenset[int]:
        """The ranks that have ended, and from which nothing more can arrive."""
        now = time.monotonic()
        for rank in [rank for rank, request in self._expected.items() if request.Test()]:
            del self._expected[rank]
            self._heard[rank] = now
        return frozenset(r for r, since in self._heard.items() if now - since > _GRACE_SECONDS)

    def say(self) -> None:
        """Tells all others that this process ends, and waits until they have ended, too.

        MPI's own finalization waits for them in any case, but burns a core meanwhile. Should one
        of them die instead, the heartbeat ends this process.
        """
        own = np.zeros(1, np.uint8)
        sends = [self.comm.Isend(own, dest=rank, tag=_TAG) for rank in self._bytes]
        reminder = time.monotonic() + _REMINDER_SECONDS
        while self._expected or not all(send.Test() for send in sends):
            self.gone()
            time.sleep(1e-3)
            if time.monotonic() > reminder:
                reminder += _REMINDER_SECONDS
                states = self._states(frozenset(self._expected))
                print(f"jdaso: at exit, waiting for {states}", file=sys.stderr, flush=True)
