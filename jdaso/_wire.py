"""In which format a number crosses the network, and in which dtype it is added up.

A leaf crosses as an array of its own shape in a narrower dtype or, with the wire int8, as rows of
bytes: see ``_int8.py``. What is here takes both, and NumPy and JAX arrays alike.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from jdaso import _int8
from jdaso._int8 import BLOCKS as BLOCKS

WIRES = ("float64", "float32", "bfloat16", "float16", "int8")


def check_wire(name: str, wire: str | None) -> str | None:
    """Returns the wire dtype's name; raises ValueError, naming the argument, if it is none."""
    if wire is None:
        return None
    try:
        canonical = np.dtype(jnp.dtype(wire)).name
    except TypeError:
        canonical = None
    if canonical not in WIRES:
        raise ValueError(f"{name} must be one of {', '.join(WIRES)} or None, got {wire!r}.")
    return canonical


def wire_dtype(dtype, wire: str | None) -> np.dtype:
    """The dtype in which a leaf travels: the wire's if it is narrower, otherwise the leaf's own.

    With the wire int8 it is that of bytes, ``BLOCKS``.

    >>> wire_dtype(np.float64, "float32").name, wire_dtype(np.float16, "float32").name
    ('float32', 'float16')
    """
    if wire == "int8":
        return BLOCKS
    own = np.dtype(dtype)
    chosen = own if wire is None else np.dtype(jnp.dtype(wire))
    return chosen if chosen.itemsize < own.itemsize else own


def wire_shape(shape: tuple[int, ...], dtype) -> tuple[int, ...]:
    """The shape in which a leaf of some shape travels in its ``wire_dtype``.

    >>> wire_shape((8, 100), np.dtype("float16")), wire_shape((8, 100), BLOCKS)
    ((8, 100), (13, 65))
    """
    return (_int8.count(shape), _int8.BYTES) if dtype == BLOCKS else tuple(shape)


def sum_shape(shape: tuple[int, ...], dtype) -> tuple[int, ...]:
    """The shape of the sum of arrays of a ``wire_shape``; see :func:`unpadded`."""
    return (*shape[:-1], _int8.NUMBERS) if dtype == BLOCKS else shape


def unpadded(total, shape: tuple[int, ...]):
    """A sum in the shape of its leaf, without what the last block was filled up with."""
    return total.reshape(-1)[: math.prod(shape)].reshape(shape)


def sum_dtype(dtype) -> np.dtype:
    """The dtype in which leaves are added up: float64 for float64, otherwise float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def pack(leaf, dtype):
    """A leaf as it travels in its ``wire_dtype``."""
    return _int8.pack(_int8.in_blocks(leaf)) if dtype == BLOCKS else leaf.astype(dtype)


def unpack(packed):
    """What has travelled, in the dtype in which it is added up."""
    return (
        _int8.unpack(packed) if packed.dtype == BLOCKS else packed.astype(sum_dtype(packed.dtype))
    )


def rounded(leaf):
    """A leaf, in its own dtype, as if it had travelled with the wire int8.

    >>> rounded(np.array([127.0, 0.6, -0.5])).tolist()
    [127.0, 1.0, 0.0]
    """
    return unpadded(unpack(pack(leaf, BLOCKS)), leaf.shape).astype(leaf.dtype)


def back_factor(dtype, num_nodes: int) -> int:
    """By what a sum is divided while it travels back: float16 ends at 65504, so the mean goes."""
    return num_nodes if np.dtype(dtype) == np.float16 else 1


def pack_sum(total, dtype, num_nodes: int):
    """A sum of what :func:`unpack` has returned, as it travels back to the nodes."""
    if dtype == BLOCKS:
        return _int8.pack(total)
    return (total / back_factor(dtype, num_nodes)).astype(dtype)


def unpack_sum(packed, num_nodes: int):
    """The sum that :func:`pack_sum` packed, rounded to the wire, in its ``sum_dtype``."""
    return unpack(packed) * back_factor(packed.dtype, num_nodes)
