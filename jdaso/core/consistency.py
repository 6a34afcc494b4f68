"""What must be equal on all nodes, as a few numbers that travel with every exchange.

Nodes at different steps would sum unrelated parameters, or wait for each other for ever. Each
node therefore sends its period, delay and phase, and fingerprints of larger things. An exchange
between processes compares these numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.core.types import Plan, PyTree


def agreement_numbers(plan: Plan, schedule: PyTree, shared: PyTree) -> jax.Array:
    """The numbers that ``AGREEMENT_NAMES`` names.

    Args:
        plan: what the schedule requests at this step.
        schedule: the schedule's state.
        shared: what else is the same on all nodes: a centre, an anchor, replicated parameters.

    Returns:
        float32[5], whole numbers. Those above 2^24 are rounded to float32.
    """
    numbers = [plan.period, plan.delay, plan.phase, fingerprint(schedule), fingerprint(shared)]
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])


def fingerprint(tree: PyTree) -> jax.Array:
    """A number that differs, with high probability, if the bits of two trees differ.

    With w_j the 32-bit words of a leaf, it combines ``sum_j (2 j + 1) w_j`` modulo 2^32 of all
    leaves. It detects the change of any single word, but for about one in 2^24, and most changes
    of several words. It does not detect the change of the signs of an even number of words.

    Returns:
        int32 scalar in [0, 2^24), 0 if the tree has no leaf.

    >>> a, b = jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])
    >>> len({int(fingerprint(tree)) for tree in (a, b, {"a": a, "b": b}, ())})
    4
    """
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        words = _words(jnp.asarray(leaf))
        weights = 2 * _positions(words.shape) + 1
        total = 31 * total + jnp.sum(words * weights, dtype=jnp.uint32)
    return ((total ^ (total >> 24)) & 0xFFFFFF).astype(jnp.int32)


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """The position of each element in the flat array, uint32.

    A flat array itself would have to be gathered if the leaf is sharded.
    """
    total = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(np.cumprod((1, *shape[:0:-1]))[::-1] if shape else ()):
        total += jnp.uint32(stride % 2**32) * lax.broadcasted_iota(jnp.uint32, shape, axis)
    return total


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as uint32. Narrower dtypes are padded with zero bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    size = min(leaf.dtype.itemsize, 4)  # 64-bit numbers become two words
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
