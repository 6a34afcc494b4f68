"""Numbers rounded to 8 bits, in blocks of 64 that have a scale of their own, a power of two.

A block takes 65 bytes: an exponent e, and for each of its numbers a whole number k of at most 127,
which stands for ``k 2^e``. The exponent is the smallest that reaches the largest number. Since
scales are powers of two, nothing is ever rounded but the k: to round again changes nothing, and
NumPy and XLA, on any device, get the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

#: Numbers of a block, and bytes that they take.
NUMBERS = 64
BYTES = 1 + NUMBERS
#: The dtype of rows of ``BYTES``; only floating-point leaves cross, so it can mean nothing else.
BLOCKS = np.dtype(np.uint8)
# From 2^-100, since XLA takes numbers below 2^-126 for 0 and NumPy does not: so they are 0 for
# both. Up to 2^121, where 127 of it are still finite; what is larger is cut off there.
LOWEST, HIGHEST = -100, 121


def pack(numbers: Any) -> Any:
    """Rounds blocks of numbers to the nearest, ties to even.

    Args:
        numbers: float32[..., 64], a NumPy or JAX array.

    Returns:
        uint8[..., 65], of the same kind: an exponent and the whole numbers, both signed.

    >>> rows = pack(np.arange(64, dtype=np.float32)[None])
    >>> rows.shape, rows[0, :5].tolist()
    ((1, 65), [255, 0, 2, 4, 6])
    """
    xp = numbers.__array_namespace__()
    # Floats of one sign are ordered as their bits are. 127 is 1.984375 times 2^6: above that in
    # the mantissa, 0x7E0000, adding 0x1FFFF carries into the exponent.
    largest = (numbers.view(np.int32) & 0x7FFFFFFF).max(axis=-1, keepdims=True)
    exponents = (((largest + 0x1FFFF) >> 23) - (127 + 6)).clip(LOWEST, HIGHEST)
    whole = (numbers * _power(-exponents)).round().clip(-127, 127)
    return xp.concatenate([exponents.astype(np.int8), whole.astype(np.int8)], axis=-1).view(BLOCKS)


def unpack(rows: Any) -> Any:
    """The inverse of :func:`pack`: uint8[..., 65] -> float32[..., 64].

    >>> numbers = np.arange(64, dtype=np.float32)[None]
    >>> bool((unpack(pack(numbers)) == numbers).all())
    True
    """
    signed = rows.view(np.int8)
    return signed[..., 1:].astype(np.float32) * _power(signed[..., :1].astype(np.int32))


def in_blocks(leaf: Any) -> Any:
    """The numbers of an array of any shape as float32[blocks, 64], the last block with zeros."""
    flat = leaf.astype(np.float32).reshape(-1)
    padding = flat.__array_namespace__().zeros(-flat.size % NUMBERS, np.float32)
    return flat.__array_namespace__().concatenate([flat, padding]).reshape(-1, NUMBERS)


def count(shape: tuple[int, ...]) -> int:
    """How many blocks hold an array of this shape.

    >>> count((3, 64)), count((65,)), count(())
    (3, 2, 1)
    """
    return -(-math.prod(shape) // NUMBERS)


def _power(exponents: Any) -> Any:
    """2 to the power of int32 numbers, from the bits of a float32."""
    return ((exponents + 127) << 23).view(np.float32)
