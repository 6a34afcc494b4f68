"""Locks between processes of one host. The kernel releases those of a process that dies."""

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator

import numpy as np

from jdaso.core.types import JdasoError

_PAUSE_SECONDS = 5e-5
NO_HOLDER = 0


class Locks:
    """Locks on the bytes of a file, and the processes that are alive.

    The kernel releases the lock of a process that dies. The rank of the holder stays in shared
    memory, so the next process to acquire the lock knows that a write was not completed. Each
    process also locks a byte of its own for as long as it lives.

    Args:
        descriptor: Descriptor of a file that each process has opened by itself.
        holders: int64[number of locks], zeros, in shared memory. Rank + 1 of each lock's holder.
        timeout: Seconds to wait for a lock.
    """

    def __init__(
        self,
        descriptor: int,
        holders: np.ndarray,
        rank: int,
        describe: Callable[[int], str],
        timeout: float,
    ):
        self._descriptor, self._holders, self._rank = descriptor, holders, rank
        self._describe, self._timeout = describe, timeout
        self._try_lock(self._liveness_byte(rank))

    @contextlib.contextmanager
    def acquire(self, number: int) -> Iterator[None]:
        """Holds a lock for the body of a ``with`` statement.

        It raises JdasoError if the last holder died or raised in its body, or after the timeout.
        """
        deadline = time.monotonic() + self._timeout
        while not self._try_lock(number):
            if time.monotonic() > deadline:
                holder = int(self._holders[number])
                who = "another process" if holder == NO_HOLDER else self._describe(holder - 1)
                raise JdasoError(
                    f"{self._describe(self._rank)} has waited {self._timeout:g} s for the lock of "
                    f"the leaves of process {number}: {who} holds it. Check whether that process "
                    "is stopped."
                )
            time.sleep(_PAUSE_SECONDS)
        try:
            if (holder := int(self._holders[number])) != NO_HOLDER:
                raise JdasoError(
                    f"{self._describe(holder - 1)} ended while it wrote the leaves of process "
                    f"{number} to the shared memory, which are incomplete now. Restart from the "
                    "last checkpoint."
                )
            self._holders[number] = self._rank + 1
            yield
            self._holders[number] = NO_HOLDER  # not after an exception
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, number)

    def announce_exit(self) -> None:
        """From now on, :meth:`is_alive` is False for this process."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, self._liveness_byte(self._rank))

    def is_alive(self, rank: int) -> bool:
        """Whether another process has neither ended nor announced its exit."""
        byte = self._liveness_byte(rank)
        if not self._try_lock(byte):
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
        return False

    def _try_lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _liveness_byte(self, rank: int) -> int:
        return len(self._holders) + rank
