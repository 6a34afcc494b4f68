"""Updates applied to parameters of which some may have been lost."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdaso._base import PyTree
from jdaso._leaves import is_float, known


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Like :func:`optax.apply_updates`, but parameters that are not finite count as 0.

    A step whose result would not be finite is skipped, so an algorithm that averages parameters
    makes no such ones. What else may, a fault of the hardware for instance, no update could mend:
    NaN plus any number is NaN. With this function the node goes on with 0 in their place, is left
    out of sums meanwhile, and has the others' mean after the next merge.

    Args:
        params: arrays.
        updates: what ``tx.update`` returned; None leaves a parameter as it is.

    Returns:
        A tree like ``params``; the same bits as optax's where they are finite.

    >>> apply_updates(jnp.array([1.0, jnp.nan]), jnp.array([0.5, 2.0])).tolist()
    [1.5, 2.0]
    """

    def move(x, update):
        if x is None or update is None:
            return x
        x = jnp.asarray(x)
        return ((known(x) if is_float(x) else x) + update).astype(x.dtype)

    return jax.tree.map(move, params, updates, is_leaf=lambda x: x is None)
