"""Pinned host memory, which CUDA devices copy to and from asynchronously."""

from __future__ import annotations

import functools
import itertools
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable

from jdaso.exchange.host.buffers import StagingBuffers


class PinnedMemory:
    """Pins the buffers of exchanges, and unpins them before they are freed.

    Args:
        pin: ``(address, bytes)``, pins whole pages and returns whether that succeeded.
        unpin: ``(address)``.
    """

    def __init__(self, pin: Callable[[int, int], bool], unpin: Callable[[int], object]):
        self._pin, self._unpin = pin, unpin
        self._pinned: set[int] = set()
        self._lock = threading.Lock()

    def add(self, staging: StagingBuffers) -> None:
        """Pins the buffers of one exchange. Copies are slower where pinning fails."""
        staging.used_by_devices = True
        with self._lock:
            for array in itertools.chain(*staging.pairs):
                address, pages = array.ctypes.data, -(-array.nbytes // mmap.PAGESIZE)
                if address in self._pinned or not pages:
                    continue
                if not self._pin(address, pages * mmap.PAGESIZE):
                    _warn_once()
                    continue
                self._pinned.add(address)
                weakref.finalize(array.base, self._free, address).atexit = False

    def _free(self, address: int) -> None:
        # Without the lock, because memory may be freed in a thread that holds it.
        self._pinned.discard(address)
        self._unpin(address)


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "CUDA cannot pin host memory for exchanges: copies are slower and block training. Raise "
        "the limit of locked memory (ulimit -l).",
        stacklevel=2,
    )
