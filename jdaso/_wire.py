"""In which dtype a number crosses the network, and in which it is added up."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

WIRES = ("float64", "float32", "bfloat16", "float16")


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


def chosen_wire(name: str, wire: str | None, of_exchange: str | None, default: str) -> str:
    """The wire of an algorithm: what was asked for, that of its exchange, or its default.

    Raises:
        ValueError: if what was asked for is no wire, or the exchange is bound to another.
    """
    wire = check_wire(name, wire)
    if wire is not None and of_exchange not in (None, wire):
        raise ValueError(
            f"{name}={wire!r} contradicts the exchange, which was made with "
            f"wire={of_exchange!r}; give it in one place."
        )
    return wire or of_exchange or default


def wire_dtype(dtype, wire: str | None) -> np.dtype:
    """The dtype in which a leaf travels: the wire's if it is narrower, otherwise the leaf's own.

    >>> wire_dtype(np.float64, "float32").name, wire_dtype(np.float16, "float32").name
    ('float32', 'float16')
    """
    own = np.dtype(dtype)
    chosen = own if wire is None else np.dtype(jnp.dtype(wire))
    return chosen if chosen.itemsize < own.itemsize else own


def sum_dtype(dtype) -> np.dtype:
    """The dtype in which leaves are added up: float64 for float64, otherwise float32."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def back_factor(dtype, num_nodes: int) -> int:
    """By what a sum is divided while it travels back: float16 ends at 65504, so the mean goes."""
    return num_nodes if np.dtype(dtype) == np.float16 else 1


def pack_sum(total, dtype, num_nodes: int):
    """A sum in the wire dtype, as it travels back to the nodes; numpy and jax arrays."""
    return (total / back_factor(dtype, num_nodes)).astype(dtype)


def unpack_sum(packed, num_nodes: int):
    """The sum that :func:`pack_sum` packed, rounded to the wire, in its ``sum_dtype``."""
    return packed.astype(sum_dtype(packed.dtype)) * back_factor(packed.dtype, num_nodes)
