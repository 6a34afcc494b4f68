"""Host memory that devices copy to and from by themselves."""

from __future__ import annotations

import functools
import itertools
import mmap
import threading
import warnings
import weakref
from collections.abc import Callable

from jdaso.exchange._staging import Staging


class Pins:
    """Pins memory of exchanges, until it is freed.

    Args:
        pin: ``(address, bytes)``, of whole pages; returns whether that could be done.
        unpin: ``(address)``.
    """

    def __init__(self, pin: Callable[[int, int], bool], unpin: Callable[[int], object]):
        self._pin, self._unpin = pin, unpin
        self._pinned: set[int] = set()
        self._lock = threading.Lock()

    def add(self, staging: Staging) -> None:
        """Pins the memory of one exchange; where that cannot be done, copies take longer."""
        staging.for_devices = True
        with self._lock:
            for array in itertools.chain(*staging.pairs):
                place, pages = array.ctypes.data, -(-array.nbytes // mmap.PAGESIZE)
                if place in self._pinned or not pages:
                    continue
                if not self._pin(place, pages * mmap.PAGESIZE):
                    _warn_once()
                    continue
                self._pinned.add(place)
                weakref.finalize(array.base, self._free, place).atexit = False

    def _free(self, place: int) -> None:
        # Without the lock: memory may be freed in a thread that holds it.
        self._pinned.discard(place)
        self._unpin(place)


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "CUDA cannot pin host memory for exchanges: copies take longer, and training waits for "
        "them. More memory may have to be allowed.",
        stacklevel=2,
    )
