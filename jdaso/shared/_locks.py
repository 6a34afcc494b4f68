"""Locks between processes of one host, which the system takes back from a process that dies."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator

import numpy as np

from jdaso._base import JdasoError

_PAUSE_SECONDS = 5e-5
NOBODY = 0


class Locks:
    """Locks on the bytes of a file, and who is still there.

    Each process also holds a lock of its own for as long as it lives. A lock that a process held
    when it died is free at once, but the mark that it left, in shared memory, is still there: so
    whoever takes the lock next knows that something was left half done.

    Args:
        descriptor: of a file that all processes have opened, each by itself.
        holders: int64[number of locks], zeros, in shared memory; rank + 1 of who is writing.
        rank: of this process.
        describe: a rank with its host, for errors.
        timeout: seconds that anybody may hold a lock.
    """

    def __init__(
        self,
        descriptor: int,
        holders: np.ndarray,
        rank: int,
        describe: Callable[[int], str],
        timeout: float,
    ):
        self._descriptor = descriptor
        self._holders = holders
        self._rank = rank
        self._describe = describe
        self._timeout = timeout
        self._take(self._life_of(rank))

    @contextlib.contextmanager
    def hold(self, number: int) -> Iterator[None]:
        """Holds a lock; for what leaves nothing sound if it is broken off.

        Raises:
            JdasoError: if the last holder died, or broke off, or one holds it for too long.
        """
        deadline = time.monotonic() + self._timeout
        while not self._take(number):
            if time.monotonic() > deadline:
                holder = int(self._holders[number])
                who = "another process" if holder == NOBODY else self._describe(holder - 1)
                raise JdasoError(
                    f"{self._describe(self._rank)} has waited {self._timeout:g} s for the lock of "
                    f"block {number}: {who} holds it and does not go on. Is it stopped?"
                )
            time.sleep(_PAUSE_SECONDS)
        try:
            holder = int(self._holders[number])
            if holder != NOBODY:
                raise JdasoError(
                    f"{self._describe(holder - 1)} ended while it wrote to block {number} of the "
                    "shared parameters, which are half written since. Start anew from the last "
                    "checkpoint."
                )
            self._holders[number] = self._rank + 1
            yield
            self._holders[number] = NOBODY  # not if it was broken off
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def leave(self) -> None:
        """Tells the others that this process takes part no more, as if it had ended."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._life_of(self._rank))

    def is_alive(self, rank: int) -> bool:
        """Whether another process has neither ended nor left."""
        byte = self._life_of(rank)
        if not self._take(byte):
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
        return False

    def _take(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _life_of(self, rank: int) -> int:
        return len(self._holders) + rank
