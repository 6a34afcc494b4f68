"""Sums of rows of blocks on the host, by compiled code where there is a compiled library."""

from __future__ import annotations

import ctypes

import numpy as np

from jdaso.core.block_format import format_of, pack, unpack
from jdaso.exchange.host import compiled


def sum_blocks(terms: np.ndarray, sums: np.ndarray, packed: np.ndarray) -> None:
    """Adds the blocks of several members in their order.

    Args:
        terms: rows of a :class:`jdaso.core.block_format.BlockFormat`, [members, rows, row_bytes].
        sums: float32[rows, 64], receives the sums.
        packed: rows of the same format, [rows, row_bytes], receives the rounded sums.

    >>> rows = format_of(np.int8)
    >>> terms = np.stack([pack(np.full((1, 64), x, np.float32), rows) for x in (1, 2)])
    >>> sums, packed = np.empty((1, 64), np.float32), np.empty((1, 65), np.int8)
    >>> sum_blocks(terms, sums, packed)
    >>> float(sums[0, 0]), bool((unpack(packed) == sums).all())
    (3.0, True)
    """
    loaded = compiled.load()
    if isinstance(loaded, ctypes.CDLL):
        addresses = [_address(array) for array in (terms, sums, packed)]
        loaded.jdaso_sum_blocks(_bits(terms), addresses[0], *terms.shape[:2], *addresses[1:])
        return
    sums[...] = unpack(terms[0])
    for term in terms[1:]:
        sums += unpack(term)
    rows = format_of(terms.dtype)
    assert rows is not None
    packed[...] = pack(sums, rows)


def unpack_blocks(packed: np.ndarray, numbers: np.ndarray) -> None:
    """Decodes rows of a format, [rows, row_bytes], into float32[rows, 64]."""
    loaded = compiled.load()
    if isinstance(loaded, ctypes.CDLL):
        loaded.jdaso_unpack_blocks(_bits(packed), _address(packed), len(packed), _address(numbers))
    else:
        numbers[...] = unpack(packed)


def _bits(rows: np.ndarray) -> int:
    blocks = format_of(rows.dtype)
    assert blocks is not None
    return blocks.bits


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data
