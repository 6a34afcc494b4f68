"""What must be equal on all nodes, as a few numbers that travel with every exchange.

Nodes that go different ways would add up what does not belong together, or wait for each other for
ever. So each says where it is, and an exchange between processes compares: period, delay and phase
as they are, and of larger things a fingerprint of their bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jdaso._base import Plan, PyTree


def agreed(plan: Plan, schedule: PyTree, shared: PyTree) -> jax.Array:
    """The numbers named ``AGREED``.

    Args:
        plan: what the schedule asks for at this step.
        schedule: the schedule's state.
        shared: what else is the same on all nodes: a centre, an anchor, replicated parameters.

    Returns:
        float32[5], whole numbers below 2^24, or as near as float32 comes to larger ones.
    """
    numbers = [plan.period, plan.delay, plan.phase, fingerprint(schedule), fingerprint(shared)]
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])


def fingerprint(tree: PyTree) -> jax.Array:
    """A number that differs where a bit does, or where equal numbers change places.

    With w_j the 32-bit words of a leaf, ``sum_j (2 j + 1) w_j`` modulo 2^32, which any single
    difference changes, and in which it does not matter who adds first.

    Args:
        tree: arrays of any dtype.

    Returns:
        int32 scalar in [0, 2^24); 0 if there is no leaf.

    >>> a, b = jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])
    >>> len({int(fingerprint(tree)) for tree in (a, b, {"a": a, "b": b}, ())})
    4
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        words = _words(jnp.asarray(leaf)).reshape(-1)
        weights = 2 * lax.iota(jnp.uint32, words.size) + 1
        total = 31 * total + jnp.sum(words * weights, dtype=jnp.uint32)
    return ((total ^ (total >> 24)) & 0xFFFFFF).astype(jnp.int32)


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as uint32, narrower ones filled up with zeros."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    narrow = min(leaf.dtype.itemsize, 4)  # of 64 bits, two words
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * narrow}")).astype(jnp.uint32)
