"""Host memory of an exchange: what is sent, where the sums arrive, and its reuse."""

from __future__ import annotations

import functools
import math
import time
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdaso._wire import sum_dtype


class Spec(NamedTuple):
    """Shape and wire dtype of one leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype


# What is noted while memory is used, by Python or compiled code: how many devices have taken the
# sums, and when copying leaves and sums began and ended, in seconds of the monotonic clock.
RECORD = np.dtype(
    [("taken", "<i4"), ("unused", "<i4"), ("fill", "<f8", (2,)), ("take", "<f8", (2,))]
)


class Addresses(NamedTuple):
    """Of a staging's leaves and sums, each uint32[number + 1, 2], the low half first.

    The last row is the address of the record of what was done.
    """

    of_leaves: np.ndarray
    of_sums: np.ndarray


class Staging:
    """Leaves laid end to end in one vector per wire dtype, and as many sums.

    Two copies of what crosses, on the host, allocated once.

    Args:
        specs: shape and wire dtype of the leaves, in order.

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
            start = lengths.get(dtype, 0)
            lengths[dtype] = start + math.prod(shape)
            places.append(slice(start, lengths[dtype]))
        pairs = {
            dtype: (np.empty(length, dtype), np.empty(length, sum_dtype(dtype)))
            for dtype, length in lengths.items()
        }
        self.pairs = list(pairs.values())
        #: What is sent, in the leaves' shapes.
        self.leaves = [
            pairs[dtype][0][place].reshape(shape)
            for (shape, dtype), place in zip(self.specs, places, strict=True)
        ]
        #: The sums in the leaves' shapes.
        self.sums = [
            pairs[dtype][1][place].reshape(shape)
            for (shape, dtype), place in zip(self.specs, places, strict=True)
        ]
        self.record = np.zeros((), RECORD)

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

    def reuse(self) -> None:
        """Readies the memory for another exchange."""
        self.record = np.zeros((), RECORD)

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that differs where shapes or wire dtypes do."""
        return zlib.crc32(repr(self.specs).encode())

    @property
    def addresses(self) -> Addresses:
        """Where everything is, for compiled code."""
        record = _rows([self.record])
        return Addresses(*(np.concatenate([rows, record]) for rows in self._addresses))

    @functools.cached_property
    def _addresses(self) -> tuple[np.ndarray, np.ndarray]:
        return _rows(self.leaves), _rows(self.sums)


def _rows(arrays: Sequence[np.ndarray]) -> np.ndarray:
    places = [array.ctypes.data for array in arrays]
    return np.array([[place & 0xFFFFFFFF, place >> 32] for place in places], np.uint32)


class Pool:
    """Memory of ended exchanges, for later ones of the same leaves."""

    def __init__(self) -> None:
        self._spare: dict[tuple[tuple[int, ...], ...], list[tuple[Staging, int]]] = {}

    def take(self, specs: Sequence[Spec]) -> Staging:
        """Spare memory that nobody reads any more, or new memory; none for another wire."""
        shapes = tuple(spec.shape for spec in specs)
        spare = self._spare.get(shapes, [])
        # Sums of another wire will not be asked for again soon: their memory goes.
        spare[:] = [entry for entry in spare if entry[0].specs == tuple(specs)]
        for index, (staging, takers) in enumerate(spare):
            if staging.record["taken"] == takers:
                del spare[index]
                staging.reuse()
                return staging
        return Staging(specs)

    def give_back(self, staging: Staging, takers: int) -> None:
        """Returns memory, from which so many devices copy the sums."""
        shapes = tuple(spec.shape for spec in staging.specs)
        self._spare.setdefault(shapes, []).append((staging, takers))
