"""The wire formats: how leaves are packed for the network, and in which dtype they are summed.

A leaf is sent as an array of the same shape in the wire dtype. With the wires int8 and float4 it is
sent as rows of bytes, see ``block_format.py``. The functions take NumPy and JAX arrays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.core import block_format
from jdaso.core.block_format import FORMATS, format_of

# The range of float16 and of floats of 8 bits is shorter than this, that of bfloat16 is longer.
_SHORT_RANGE = 1e30
#: The wire of all leaves, or a tuple with one for each.
Wire = str | tuple[str | None, ...] | None
WIRES = ("float64", "float32", "bfloat16", "float16", *FORMATS)


def check_wire(name: str, wire: str | None) -> str | None:
    """Returns the canonical name of a wire dtype. Raises ValueError for an unknown one."""
    if wire is None or (isinstance(wire, str) and wire in FORMATS):
        return wire
    try:
        canonical = np.dtype(jnp.dtype(wire)).name
    except TypeError:
        canonical = None
    if canonical not in WIRES:
        raise ValueError(f"{name} must be one of {', '.join(WIRES)} or None, got {wire!r}.")
    return canonical


def wire_dtype(dtype, wire: str | None) -> np.dtype:
    """The dtype in which a leaf is sent: the wire's if it is narrower, otherwise the leaf's.

    With the wires int8 and float4 it is that of their rows.

    >>> wire_dtype(np.float64, "float32").name, wire_dtype(np.float16, "float32").name
    ('float32', 'float16')
    """
    if wire in FORMATS:
        return FORMATS[wire].dtype
    own = np.dtype(dtype)
    chosen = own if wire is None else np.dtype(jnp.dtype(wire))
    return chosen if chosen.itemsize < own.itemsize else own


def wire_dtypes(dtypes, wire) -> tuple[np.dtype, ...]:
    """The dtypes in which leaves are sent, on one wire for all or a tuple with one for each.

    >>> [x.name for x in wire_dtypes([np.float32, np.float32], ("bfloat16", None))]
    ['bfloat16', 'float32']
    """
    wires = wire if isinstance(wire, tuple) else (wire,) * len(dtypes)
    return tuple(wire_dtype(dtype, each) for dtype, each in zip(dtypes, wires, strict=True))


def wire_shape(shape: tuple[int, ...], dtype) -> tuple[int, ...]:
    """The shape in which a leaf is sent in its ``wire_dtype``.

    >>> wire_shape((8, 100), np.dtype("float16")), wire_shape((8, 100), np.dtype("int8"))
    ((8, 100), (13, 65))
    """
    rows = format_of(dtype)
    return (block_format.num_blocks(shape), rows.row_bytes) if rows else tuple(shape)


def sum_shape(shape: tuple[int, ...], dtype) -> tuple[int, ...]:
    """The shape of a sum of arrays of a ``wire_shape``, before :func:`unpadded`."""
    return (*shape[:-1], block_format.BLOCK_SIZE) if format_of(dtype) else shape


def sum_padding(dtype) -> int:
    """The most bytes of padding at the end of a sum of arrays in a wire dtype."""
    item = sum_dtype(np.float32).itemsize
    return item * (block_format.BLOCK_SIZE - 1) if format_of(dtype) else 0


def unpadded(total, shape: tuple[int, ...]):
    """A sum in the shape of its leaf, without the padding of the last block."""
    return total.reshape(-1)[: math.prod(shape)].reshape(shape)


def sum_dtype(dtype) -> np.dtype:
    """The dtype in which leaves are summed: float64 for float64, otherwise float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def round_to(x, dtype):
    """Converts an array to a dtype and rounds it to the numbers of that dtype.

    Use it in place of ``astype`` wherever the result counts as rounded, as what a node sends does.
    After ``astype``, a compiled program may go on with the numbers from before the conversion: XLA
    leaves out a conversion to a narrower dtype and back unless ``xla_allow_excess_precision`` is
    off, and its CPU backend does so in sums of large arrays even then. An array that has the dtype
    already is rounded as well, because it may be the result of such a conversion. XLA never leaves
    out ``lax.reduce_precision``. The result has the bits of ``astype``.

    >>> round_to(jnp.array([1.001, 2.99]), jnp.bfloat16).tolist()
    [1.0, 2.984375]
    """
    dtype = np.dtype(dtype)
    if not (jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)):
        return x.astype(dtype)
    if x.dtype == np.float64 and dtype.itemsize < 4:
        x = round_to(x, np.float32)  # as XLA does, and NumPy for bfloat16
    if isinstance(x, np.ndarray | np.generic) or max(4, x.dtype.itemsize) <= dtype.itemsize:
        return x.astype(dtype)
    numbers, wide = jnp.finfo(dtype), x.astype(sum_dtype(x.dtype))
    if numbers.nexp == 8:  # the range of float32
        return lax.reduce_precision(wide, 8, numbers.nmant).astype(dtype)
    # reduce_precision replaces subnormal numbers by 0, and knows no dtype without infinity.
    normal = lax.reduce_precision(wide, 8, numbers.nmant)
    tiny = float(numbers.smallest_subnormal)
    subnormal = lax.round(wide / tiny, lax.RoundingMethod.TO_NEAREST_EVEN) * tiny
    near = jnp.where(jnp.abs(wide) < float(numbers.smallest_normal), subnormal, normal)
    overflow = jnp.sign(wide) * float(dtype.type(np.inf))
    return jnp.where(jnp.abs(near) > float(numbers.max), overflow, near).astype(dtype)


def pack(leaf, dtype):
    """Converts a leaf to its ``wire_dtype``."""
    rows = format_of(dtype)
    return block_format.pack(block_format.to_blocks(leaf), rows) if rows else round_to(leaf, dtype)


def unpack(packed):
    """Converts a packed leaf to its ``sum_dtype``."""
    if format_of(packed.dtype):
        return block_format.unpack(packed)
    return packed.astype(sum_dtype(packed.dtype))


def rounded(leaf, bits):
    """Rounds a leaf with JAX as the wire of these :func:`block_bits` does. They may be traced.

    >>> rounded(jnp.array([127.0, 0.6, -0.5]), bits=8).tolist()
    [127.0, 1.0, 0.0]
    """
    blocks = block_format.round_blocks(block_format.to_blocks(leaf), bits)
    return unpadded(blocks, leaf.shape).astype(leaf.dtype)


def block_bits(wire: str | None) -> int:
    """Returns the bits of a number on the wires int8 and float4, and 0 for other wires.

    >>> block_bits("int8"), block_bits("float4"), block_bits("float32")
    (8, 4, 0)
    """
    return FORMATS[wire].bits if wire in FORMATS else 0


#: The wire that has these ``block_bits``; None for all wires with 0.
WIRE_OF_BITS = {block_bits(wire): wire for wire in (None, *FORMATS)}


def has_short_range(dtype) -> bool:
    """Whether a parameter or a sum may well be too large for a wire dtype, such as float16."""
    return not format_of(dtype) and float(jnp.finfo(dtype).max) < _SHORT_RANGE


def describe_narrow_wires(dtypes) -> str:
    """What to add to a message about numbers that are not finite on the wire, or "".

    >>> describe_narrow_wires([np.dtype(np.float16)])
    ', or above 65504 in magnitude, which the wire float16 cannot hold: use the wire bfloat16'
    >>> describe_narrow_wires([np.dtype(np.float32)])
    ''
    """
    return "".join(
        f", or above {float(jnp.finfo(dtype).max):g} in magnitude, which the wire {dtype.name} "
        "cannot hold: use the wire bfloat16"
        for dtype in dict.fromkeys(dtypes)
        if has_short_range(dtype)
    )


def finite_like_packed(leaf, dtype):
    """An array whose numbers are all finite if those of a leaf in its wire dtype are.

    Rows of int8 and float4 are always finite, so for them it is the leaf.
    """
    if format_of(dtype):
        return leaf
    if dtype == jnp.bfloat16 and leaf.dtype == jnp.float32:
        # What bfloat16 cannot hold overflows in this product, which is faster than rounding. The
        # products are summed, because a call of compiled code would keep all of them in memory.
        scaled = leaf * (float(jnp.finfo(leaf.dtype).max) / float(jnp.finfo(dtype).max))
        return jnp.sum(scaled * 0)
    return round_to(leaf, dtype)


def sum_divisor(dtype, num_nodes: int) -> int:
    """The divisor of a sum on its way back. It is not 1 for dtypes whose sums may overflow.

    >>> [sum_divisor(dtype, 4) for dtype in (np.float32, jnp.bfloat16, np.float16)]
    [1, 1, 4]
    """
    return num_nodes if has_short_range(dtype) else 1


def pack_sum(total, dtype, num_nodes: int):
    """Packs a sum of unpacked leaves, to send it back to the nodes."""
    if rows := format_of(dtype):
        return block_format.pack(total, rows)
    return round_to(total / sum_divisor(dtype, num_nodes), dtype)


def unpack_sum(packed, num_nodes: int):
    """The inverse of :func:`pack_sum`, in the ``sum_dtype``."""
    return unpack(packed) * sum_divisor(packed.dtype, num_nodes)


class Pieces(NamedTuple):
    """Elements of a vector for each member: int64[P] starts and counts."""

    starts: np.ndarray
    counts: np.ndarray

    def of(self, member: int) -> slice:
        return slice(self.starts[member], self.starts[member] + self.counts[member])


def shards(length: int, size: int) -> Pieces:
    """The elements of a vector that each of ``size`` members sums.

    >>> shards(7, 2)
    Pieces(starts=array([0, 3]), counts=array([3, 4]))
    """
    bounds = length * np.arange(size + 1, dtype=np.int64) // size
    return Pieces(bounds[:-1], np.diff(bounds))
