"""Applies gradients with an optimizer that averages between nodes, in one call."""

from __future__ import annotations

from typing import Any

from jdaso.core.transformation import Averaging
from jdaso.core.types import PyTree


def apply_gradients(
    tx: Averaging, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Updates the parameters with the optimizer, and merges and posts what is due.

    It computes what ``tx.update`` and ``optax.apply_updates`` compute, up to rounding. But the
    averaging changes the parameters in place, in one conditional after the optimizer's update. If
    parameters and state are donated, it costs no memory and little time at steps without exchange.

    Args:
        tx: from :func:`jdaso.chain`, or one with its own averaging, such as :func:`jdaso.eamsgd`.
        grads: a tree like ``params``.
        opt_state: the state that ``tx.init`` or this function returned.
        params: arrays.
        **extra_args: passed to the local optimizer. Schedules observe ``value=loss``.

    Returns:
        The new parameters and the new optimizer state.

    Raises:
        ValueError: for any other optimizer.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.local_sgd(jdaso.single_exchange(), period=4)
    >>> tx = jdaso.chain(optax.sgd(1.0), averaging)
    >>> params = jnp.array([1.0, 2.0])
    >>> params, state = jdaso.apply_gradients(tx, jnp.ones(2), tx.init(params), params)
    >>> params.tolist()
    [0.0, 1.0]
    """
    if not isinstance(tx, Averaging) or tx.apply is None:
        raise ValueError(
            "tx must be what jdaso.chain(optimizer, averaging) returned, or an optimizer that "
            f"contains its averaging, such as jdaso.eamsgd; got an object of type "
            f"{type(tx).__name__}: pass jdaso.chain(optimizer, averaging), or call tx.update and "
            "optax.apply_updates."
        )
    return tx.apply(grads, opt_state, params, **extra_args)
