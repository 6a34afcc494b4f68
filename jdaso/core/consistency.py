"""What must be equal on all nodes, as a few numbers that travel with every exchange.

Nodes at different steps would sum unrelated parameters, or wait for each other forever. Each
node therefore sends its period, delay and phase, and fingerprints of larger things. An exchange
between processes compares these numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jdaso.core.types import Plan, PyTree

# Gives each axis weights of its own.
_ODD = 0x9E3779B1


def agreement_numbers(plan: Plan, schedule: PyTree, shared: PyTree) -> jax.Array:
    """The numbers that ``AGREEMENT_NAMES`` names.

    Args:
        plan: what the schedule requests at this step.
        schedule: the schedule's state.
        shared: what else is the same on all nodes: a center, an anchor, replicated parameters.

    Returns:
        float32[5], whole numbers. Those above 2^24 are rounded to float32.
    """
    numbers = [plan.period, plan.delay, plan.phase, fingerprint(schedule), fingerprint(shared)]
    return jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])


def fingerprint(tree: PyTree) -> jax.Array:
    """A number that differs, with high probability, if the bits of two trees differ.

    It sums the 32-bit words of a leaf with odd weights, modulo 2^32, along each axis. It detects
    the change of any single word, but for about one in 2^24, and most changes of several words. It
    does not detect the change of the signs of an even number of words.

    Returns:
        int32 scalar in [0, 2^24), 0 if the tree has no leaf.

    >>> a, b = jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])
    >>> len({int(fingerprint(tree)) for tree in (a, b, {"a": a, "b": b}, ())})
    4
    """
    sums = [jnp.uint32(0)]
    for leaf in jax.tree.leaves(tree):
        words = _words(jnp.asarray(leaf))
        # The weights depend on the leaf before, so that XLA has the products of one leaf after the
        # other in memory.
        first = 2 * sums[-1] + 1
        for axis in range(words.ndim):
            step = 2 * jnp.uint32(pow(_ODD, axis, 2**32))
            weights = first + step * lax.iota(jnp.uint32, len(words))
            weights = weights.reshape(-1, *[1] * (words.ndim - 1))
            words = jnp.sum(words * weights, axis=0, dtype=jnp.uint32)
        sums.append(words)
    odd = 2 * jnp.arange(len(sums), dtype=jnp.uint32) + 1
    total = jnp.sum(jnp.stack(sums) * odd, dtype=jnp.uint32)
    return ((total ^ (total >> 24)) & 0xFFFFFF).astype(jnp.int32)


def _words(leaf: jax.Array) -> jax.Array:
    """The bits of an array as uint32. Narrower dtypes are padded with zero bits."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == bool:
        return leaf.astype(jnp.uint32)
    size = min(leaf.dtype.itemsize, 4)  # 64-bit numbers become two words
    return lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * size}")).astype(jnp.uint32)
