"""Rounds numbers to 8 bits, in blocks of 64 with a common scale, a power of two.

A block takes 65 bytes: an exponent e, and for each number an integer k between -127 and 127 that
stands for ``k 2^e``. The exponent is the smallest with which the largest number fits. Because the
scales are powers of two, only the integers are rounded. Rounding twice therefore changes nothing,
and NumPy and XLA compute the same bits on any device.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: Numbers in a block, and bytes that the block takes.
BLOCK_SIZE = 64
BLOCK_BYTES = 1 + BLOCK_SIZE
#: The dtype of packed blocks. It is unambiguous because only floating-point leaves are exchanged.
BLOCK_DTYPE = np.dtype(np.uint8)
# XLA flushes numbers below 2^-126 to 0, NumPy does not. With exponents of at least -100, both get
# 0. With exponents of at most 121, 127 2^e is finite. Larger numbers are clipped.
MIN_EXPONENT, MAX_EXPONENT = -100, 121


def pack(numbers: Any) -> Any:
    """Rounds blocks of numbers to the nearest integers of their scale, ties to even.

    Args:
        numbers: float32[..., 64], a NumPy or JAX array.

    Returns:
        uint8[..., 65], an array of the same library: the exponent and the integers, all signed.

    >>> rows = pack(np.arange(64, dtype=np.float32)[None])
    >>> rows.shape, rows[0, :5].tolist()
    ((1, 65), [255, 0, 2, 4, 6])
    """
    xp = numbers.__array_namespace__()
    # Exponent of the block: ceil(log2(largest/127)), from the bits of the largest number.
    # Floats of one sign have the same order as their bits. 127 is 1.984375 times 2^6. If the
    # mantissa exceeds that, 0x7E0000, adding 0x1FFFF carries into the exponent.
    largest = (numbers.view(np.int32) & 0x7FFFFFFF).max(axis=-1, keepdims=True)
    exponents = (((largest + 0x1FFFF) >> 23) - (127 + 6)).clip(MIN_EXPONENT, MAX_EXPONENT)
    whole = (numbers * _power(-exponents)).round().clip(-127, 127)
    rows = xp.concatenate([exponents.astype(np.int8), whole.astype(np.int8)], axis=-1)
    return rows.view(BLOCK_DTYPE)


def unpack(rows: Any) -> Any:
    """Decodes what :func:`pack` returned: uint8[..., 65] -> float32[..., 64].

    >>> numbers = np.arange(64, dtype=np.float32)[None]
    >>> bool((unpack(pack(numbers)) == numbers).all())
    True
    """
    signed = rows.view(np.int8)
    return signed[..., 1:].astype(np.float32) * _power(signed[..., :1].astype(np.int32))


def to_blocks(leaf: Any) -> Any:
    """Converts an array of any shape to float32[blocks, 64], padded with zeros."""
    flat = leaf.astype(np.float32).reshape(-1)
    padding = flat.__array_namespace__().zeros(-flat.size % BLOCK_SIZE, np.float32)
    return flat.__array_namespace__().concatenate([flat, padding]).reshape(-1, BLOCK_SIZE)


def num_blocks(shape: tuple[int, ...]) -> int:
    """The number of blocks for an array of this shape.

    >>> num_blocks((3, 64)), num_blocks((65,)), num_blocks(())
    (3, 2, 1)
    """
    return -(-math.prod(shape) // BLOCK_SIZE)


def _power(exponents: Any) -> Any:
    """2 to the power of int32 numbers, computed as the bits of a float32."""
    return ((exponents + 127) << 23).view(np.float32)
