"""Host memory of an exchange: what is sent, and where the sums arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jdaso._wire import sum_dtype


class Spec(NamedTuple):
    """Shape and wire dtype of one leaf."""

    shape: tuple[int, ...]
    dtype: np.dtype


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

    def put(self, leaves: Sequence[np.ndarray]) -> None:
        """Copies the leaves to where they are sent from."""
        for place, leaf in zip(self.leaves, leaves, strict=True):
            np.copyto(place, leaf)
