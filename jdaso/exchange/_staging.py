"""Host memory of an exchange: what is sent, where the sums arrive, and its reuse."""

from __future__ import annotations

import functools
import math
import mmap
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdaso._int8 import count
from jdaso._wire import sum_dtype, sum_shape, wire_shape


class Spec(NamedTuple):
    """Shape and dtype of one leaf as it crosses."""

    shape: tuple[int, ...]
    dtype: np.dtype


# What is noted while memory is used, by Python or compiled code: how many devices have taken the
# sums, and when copying leaves and sums began and ended, in seconds of the monotonic clock.
RECORD = np.dtype(
    [("taken", "<i4"), ("unused", "<i4"), ("fill", "<f8", (2,)), ("take", "<f8", (2,))]
)


class Addresses(NamedTuple):
    """Of a staging's leaves and sums, each uint64[number + 1].

    The last one is the address of the record of what was done.
    """

    of_leaves: np.ndarray
    of_sums: np.ndarray


class Staging:
    """Leaves laid end to end in one vector per wire dtype, and as many sums.

    Two copies of what crosses, on the host, allocated once.

    Args:
        specs: shape and dtype of the leaves as they cross, in order.

    >>> staging = Staging([Spec((2,), np.dtype("float32")), Spec((), np.dtype("float32"))])
    >>> staging.put([np.array([1.0, 2.0]), np.array(3.0)])
    >>> [vector.tolist() for vector, _ in staging.pairs]
    [[1.0, 2.0, 3.0]]
    """

    def __init__(self, specs: Sequence[Spec]):
        self.specs = tuple(specs)
        lengths: dict[np.dtype, int] = {}
        places = []
        for shape, dtype in self.specs:
            start, row = lengths.get(dtype, 0), math.prod(_row(dtype))
            lengths[dtype] = start + math.prod(shape) // row
            places.append(slice(start, lengths[dtype]))
        pairs = {
            dtype: (
                whole_pages((length, *_row(dtype)), dtype),
                whole_pages((length, *sum_shape(_row(dtype), dtype)), sum_dtype(dtype)),
            )
            for dtype, length in lengths.items()
        }
        self.pairs = list(pairs.values())
        #: What is sent, in the shapes in which it crosses.
        self.leaves = [
            pairs[dtype][0][place].reshape(shape)
            for (shape, dtype), place in zip(self.specs, places, strict=True)
        ]
        #: The sums, in the leaves' shapes or, of rows of bytes, in rows that end with zeros.
        self.sums = [
            pairs[dtype][1][place].reshape(sum_shape(shape, dtype))
            for (shape, dtype), place in zip(self.specs, places, strict=True)
        ]
        self.record = np.zeros((), RECORD)
        #: Whether devices copy to it and from it by themselves.
        self.for_devices = False

    def put(self, leaves: Sequence[np.ndarray]) -> None:
        """Copies the leaves to where they are sent from."""
        self.record["fill"][0] = time.monotonic()
        for place, leaf in zip(self.leaves, leaves, strict=True):
            np.copyto(place, leaf)
        self.record["fill"][1] = time.monotonic()

    def get(self, copy: bool) -> list[np.ndarray]:
        """The sums, for one device."""
        self.record["take"][0] = time.monotonic()
        sums = [total.copy() if copy else total for total in self.sums]
        self.record["take"][1] = time.monotonic()
        self.record["taken"] += 1
        return sums

    def move(self) -> None:
        """Goes on in new memory with the same leaves; what comes late meets the old."""
        moved = Staging(self.specs)
        for place, leaf in zip(moved.leaves, self.leaves, strict=True):
            np.copyto(place, leaf)
        self.pairs, self.leaves, self.sums = moved.pairs, moved.leaves, moved.sums
        self.__dict__.pop("addresses", None)
        _ = self.addresses  # here, as threads that ask later would each find their own

    def reuse(self) -> None:
        """Readies the memory for another exchange."""
        self.record = np.zeros((), RECORD)
        for rows in self.addresses:
            rows[-1] = self.record.ctypes.data

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that differs where shapes or wire dtypes do."""
        return zlib.crc32(repr(self.specs).encode())

    @functools.cached_property
    def addresses(self) -> Addresses:
        """Where everything is, for compiled code."""
        return Addresses(_rows([*self.leaves, self.record]), _rows([*self.sums, self.record]))


def whole_pages(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory that shares no page with any other, so that it can be pinned for a device.

    >>> memory = whole_pages((3, 2), np.dtype("float32"))
    >>> memory.shape, memory.ctypes.data % mmap.PAGESIZE
    ((3, 2), 0)
    """
    size = math.prod(shape) * dtype.itemsize
    pages = -(-size // mmap.PAGESIZE)
    memory = np.empty((pages + 1) * mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    return memory[start : start + size].view(dtype).reshape(shape)


def _rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([array.ctypes.data for array in arrays], np.uint64)


class Pool:
    """Memory of ended exchanges, for later ones of the same leaves; kept while it is read."""

    def __init__(self) -> None:
        self._reading: list[tuple[Staging, int, bool]] = []
        self._spare: dict[tuple[int, ...], list[Staging]] = {}

    def take(self, specs: Sequence[Spec]) -> Staging:
        """Memory that nobody reads any more, or new memory; there is none for another wire."""
        self._sort()
        spare = self._spare.get(_sizes(specs), [])
        # Sums of another wire will not be asked for again soon: their memory goes. But to unpin it
        # may take until a device has nothing to do, and that may wait for the one that asks here.
        kept = _dtypes(specs)
        spare[:] = [old for old in spare if old.for_devices or _dtypes(old.specs) == kept]
        staging = next((staging for staging in spare if staging.specs == tuple(specs)), None)
        if staging is None:
            return Staging(specs)
        spare.remove(staging)
        staging.reuse()
        return staging

    def give_back(self, staging: Staging, takers: int, spare: bool) -> None:
        """Returns memory, from which so many devices copy the sums; whether it is to be kept."""
        self._sort()
        self._reading.append((staging, takers, spare))

    def _sort(self) -> None:
        reading, self._reading = self._reading, []
        for entry in reading:
            staging, takers, spare = entry
            if staging.record["taken"] < takers:  # read once: compiled code may be adding to it
                self._reading.append(entry)
            elif spare:
                self._spare.setdefault(_sizes(staging.specs), []).append(staging)


def _dtypes(specs: Sequence[Spec]) -> list[np.dtype]:
    return [spec.dtype for spec in specs]


def _sizes(specs: Sequence[Spec]) -> tuple[int, ...]:
    """What leaves have in common with themselves on any other wire: how many blocks they fill."""
    return tuple(count(sum_shape(*spec)) for spec in specs)


def _row(dtype: np.dtype) -> tuple[int, ...]:
    """The shape of one element on the wire."""
    return wire_shape((), dtype)[1:]
