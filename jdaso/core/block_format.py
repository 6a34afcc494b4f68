"""Rounds numbers to 8 or 4 bits, in blocks of 64 with a common scale, a power of two.

A block of numbers is sent as a row of bytes: an exponent e, and a code for each number. The code
stands for an integer k, and the number is ``k 2^e``. The exponent is the smallest with which the
largest number of the block fits.

========  ==============  =================================================
wire      bytes of a row  integers k
========  ==============  =================================================
int8      65              -127 to 127
float4    33              0, 1, 2, 3, 4, 6, 8, 12 and their negatives
========  ==============  =================================================

The integers of float4 are those of the 4-bit floats E2M1, times two. A row of float4 holds two
codes per byte: the first 32 numbers in the low bits, the others in the high bits.

Because the scales are powers of two, only the integers are rounded. Rounding numbers twice
therefore gives the same numbers, and NumPy and XLA compute the same bits on any device.

References:
    E2M1 and scales of blocks: Rouhani et al., Microscaling data formats for deep learning,
    arXiv:2310.10537; OCP Microscaling Formats, version 1.0, section 5.3.3.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

#: Numbers in a block.
BLOCK_SIZE = 64
# XLA flushes numbers below 2^-126 to 0, and NumPy does not. Exponents of at least -100 avoid them.
MIN_EXPONENT = -100


class BlockFormat(NamedTuple):
    """A format of rows.

    Attributes:
        bits: of a number.
        limit: the largest integer.
        dtype: of rows. No other array that is exchanged has it, because leaves are floats.
    """

    bits: int
    limit: int
    dtype: np.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return 1 + BLOCK_SIZE * self.bits // 8


#: The formats, by the name of their wire.
FORMATS = {
    "int8": BlockFormat(8, 127, np.dtype(np.int8)),
    "float4": BlockFormat(4, 12, np.dtype(np.uint8)),
}
_OF_DTYPE = {each.dtype: each for each in FORMATS.values()}


def format_of(dtype: Any) -> BlockFormat | None:
    """Returns the format of rows with this dtype, or None if arrays with it are not rows.

    >>> format_of(np.dtype(np.int8)).bits, format_of(np.dtype(np.float32))
    (8, None)
    """
    return _OF_DTYPE.get(np.dtype(dtype))


def pack(numbers: Any, blocks: BlockFormat) -> Any:
    """Rounds blocks of numbers to the nearest that their scale permits, ties to even.

    Args:
        numbers: float32[..., 64], a NumPy or JAX array without NaN.
        blocks: the format.

    Returns:
        Rows of the format, an array of the same library.

    >>> numbers = np.arange(64, dtype=np.float32)[None]
    >>> pack(numbers, FORMATS["int8"])[0, :5].tolist()
    [-1, 0, 2, 4, 6]
    >>> pack(numbers, FORMATS["float4"]).shape
    (1, 33)
    """
    xp = numbers.__array_namespace__()
    exponents, scaled, doublings = _scaled(numbers, np.float32(blocks.limit), blocks.bits == 4)
    if blocks.bits == 8:
        integers = scaled.round().astype(blocks.dtype)
        return xp.concatenate([exponents.astype(blocks.dtype), integers], axis=-1)
    codes = (scaled * _power(-doublings)).round().astype(np.int32)
    codes = codes + 2 * doublings * xp.sign(codes)
    low, high = codes[..., : BLOCK_SIZE // 2], codes[..., BLOCK_SIZE // 2 :]
    pairs = (low & 15) | ((high & 15) << 4)
    return xp.concatenate([exponents & 255, pairs], axis=-1).astype(blocks.dtype)


def round_blocks(numbers: jax.Array, bits: int | jax.Array) -> jax.Array:
    """Rounds blocks as :func:`pack` and :func:`unpack` do, without making rows.

    ``bits`` are those of the format, and may be traced.

    >>> numbers = jnp.arange(64, dtype=jnp.float32)[None]
    >>> [round_blocks(numbers, bits)[0, 47].item() for bits in (8, 4)]
    [47.0, 48.0]
    """
    is_float4 = jnp.asarray(bits == FORMATS["float4"].bits)
    limit = jnp.where(is_float4, FORMATS["float4"].limit, FORMATS["int8"].limit)
    exponents, scaled, doublings = _scaled(numbers, limit.astype(np.float32), is_float4)
    integers = (scaled * _power(-doublings)).round().astype(np.int32) << doublings
    return integers.astype(np.float32) * _power(exponents)


def _scaled(numbers: Any, limit: Any, is_float4: Any) -> tuple[Any, Any, Any]:
    """Returns the exponents of blocks, their numbers divided by the scale, and the doublings.

    The integers of float4 below 4 are multiples of 1, those below 8 of 2, and all others of 4.
    """
    # Exponent of the block: ceil(log2(largest / limit)), from the bits of the largest number.
    # Floats of one sign have the same order as their bits. If the mantissa exceeds that of the
    # limit, the sum carries into the exponent.
    bits = limit.view(np.int32)
    largest = (numbers.view(np.int32) & 0x7FFFFFFF).max(axis=-1, keepdims=True)
    carry = 0x7FFFFF - (bits & 0x7FFFFF)
    exponents = ((largest + carry) >> 23) - (bits >> 23)
    # With a larger exponent, not all numbers are finite.
    exponents = exponents.clip(MIN_EXPONENT, 254 - (bits >> 23))
    scaled = (numbers * _power(-exponents)).clip(-limit, limit)
    doublings = ((abs(scaled) >= 4).astype(np.int32) + (abs(scaled) >= 8)) * is_float4
    return exponents, scaled, doublings


def unpack(rows: Any) -> Any:
    """Decodes rows, which :func:`pack` has returned, to float32[..., 64].

    >>> numbers = np.arange(64, dtype=np.float32)[None]
    >>> bool((unpack(pack(numbers, FORMATS["int8"])) == numbers).all())
    True
    >>> unpack(pack(numbers, FORMATS["float4"]))[0, [0, 8, 20, 50, 63]].tolist()
    [0.0, 8.0, 16.0, 48.0, 64.0]
    """
    signed = rows.view(np.int8)
    exponents, integers = signed[..., :1].astype(np.int32), signed[..., 1:].astype(np.int32)
    if rows.dtype == FORMATS["float4"].dtype:
        xp = rows.__array_namespace__()
        codes = xp.concatenate([(integers << 28) >> 28, integers >> 4], axis=-1)
        doublings = (abs(codes) >> 1).clip(1) - 1
        integers = (codes - 2 * doublings * xp.sign(codes)) << doublings
    return integers.astype(np.float32) * _power(exponents)


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
