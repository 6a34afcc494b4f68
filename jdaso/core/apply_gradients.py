"""Applies gradients with an optimizer, in one call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdaso.core.tree import finite_or_zero, is_float
from jdaso.core.types import PyTree


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Updates the parameters: ``tx.update``, then ``params + updates``.

    If all parameters are finite, the result has the same bits as that of ``optax.apply_updates``.
    Parameters that are not finite count as 0, because no update can change NaN to a number. A
    hardware fault can cause such parameters. The node is then left out of sums and takes the mean
    of the other nodes at the next merge.

    Args:
        tx: an optimizer, usually from :func:`jdaso.chain`.
        grads: a tree like ``params``.
        opt_state: the state that ``tx.init`` or this function returned.
        params: arrays.
        **extra_args: passed to ``tx.update``. Schedules observe ``value=loss``.

    Returns:
        The new parameters and the new optimizer state.

    >>> tx = optax.sgd(1.0)
    >>> params = jnp.array([1.0, jnp.nan])
    >>> params, _ = apply_gradients(tx, jnp.array([-0.5, -2.0]), tx.init(params), params)
    >>> params.tolist()
    [1.5, 2.0]
    """
    tx = optax.with_extra_args_support(tx)
    updates, opt_state = tx.update(grads, opt_state, params, **extra_args)

    def move(x, update):
        if x is None or update is None:
            return x
        x = jnp.asarray(x)
        return ((finite_or_zero(x) if is_float(x) else x) + update).astype(x.dtype)

    return jax.tree.map(move, params, updates, is_leaf=lambda x: x is None), opt_state
