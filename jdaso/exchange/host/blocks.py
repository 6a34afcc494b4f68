"""Sums of int8 blocks on the host, by compiled code where there is a compiled library."""

from __future__ import annotations

import ctypes

import numpy as np

from jdaso.core import int8
from jdaso.exchange.host import compiled


def sum_blocks(terms: np.ndarray, sums: np.ndarray, packed: np.ndarray) -> None:
    """Adds the blocks of several members in their order.

    Args:
        terms: uint8[members, rows, 65].
        sums: float32[rows, 64], receives the sums.
        packed: uint8[rows, 65], receives the rounded sums.

    >>> terms = np.stack([int8.pack(np.full((1, 64), x, np.float32)) for x in (1, 2)])
    >>> sums, packed = np.empty((1, 64), np.float32), np.empty((1, 65), np.uint8)
    >>> sum_blocks(terms, sums, packed)
    >>> float(sums[0, 0]), bool((int8.unpack(packed) == sums).all())
    (3.0, True)
    """
    loaded = compiled.load()
    if isinstance(loaded, ctypes.CDLL):
        addresses = [_address(array) for array in (terms, sums, packed)]
        loaded.jdaso_sum_blocks(addresses[0], *terms.shape[:2], *addresses[1:])
        return
    sums[...] = int8.unpack(terms[0])
    for term in terms[1:]:
        sums += int8.unpack(term)
    packed[...] = int8.pack(sums)


def unpack_blocks(packed: np.ndarray, numbers: np.ndarray) -> None:
    """Decodes uint8[rows, 65] into float32[rows, 64]."""
    loaded = compiled.load()
    if isinstance(loaded, ctypes.CDLL):
        loaded.jdaso_unpack_blocks(_address(packed), len(packed), _address(numbers))
    else:
        numbers[...] = int8.unpack(packed)


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
