"""Completes the exchanges in flight."""

from __future__ import annotations

from typing import Any

import jax
import optax

from jdaso.core.chain import ChainState
from jdaso.core.exchange import Exchange
from jdaso.core.state import AveragingState, averaging_state, find_state, find_states, map_states
from jdaso.core.transformation import Averaging
from jdaso.core.tree import is_floating, is_masked
from jdaso.core.types import PyTree


def drain(transformation: Averaging, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Waits for the exchanges in flight and merges them, with their actual age.

    Use it at the end of training if the schedule does not know the end, and before the state is
    saved by other means than :class:`jdaso.checkpoint.Checkpoints`, which saves what is in flight.
    It changes nothing if no exchange is in flight. The merge has the algorithm's own weight, so
    nodes still differ after that of :func:`jdaso.dasgd`. :func:`jdaso.consensus` gives the mean.

    Args:
        transformation: what ``jdaso.daso(...)``, another algorithm, or ``jdaso.chain(...)``
            returned. For an ``optax.chain`` that contains it, pass the member, not the chain.
        opt_state: the state of the whole optimizer.
        params: the node's parameters.

    Returns:
        ``(params, opt_state)`` with nothing in flight.

    Raises:
        ValueError: for another transformation, or if ``opt_state`` does not hold exactly one state
            of it.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.daso(jdaso.single_exchange(), jdaso.constant(period=4, delay=2))
    >>> tx = jdaso.chain(optax.sgd(0.1), averaging)
    >>> params = {"w": jnp.ones(3)}
    >>> params, state = jdaso.drain(tx, tx.init(params), params)
    """
    if not isinstance(transformation, Averaging):
        raise ValueError(
            "drain requires the transformation that jdaso.daso(...), another algorithm or "
            "jdaso.chain(...) returned, not an optax.chain or another wrapper around it: with "
            "averaging = jdaso.daso(...) inside the wrapper, call jdaso.drain(averaging, "
            "opt_state, params), and with tx = jdaso.chain(...) inside it jdaso.drain(tx, "
            f"opt_state, params). Got an object of type {type(transformation).__name__}."
        )
    if transformation.state_type is AveragingState and find_states(ChainState, opt_state):
        raise ValueError(
            "opt_state must belong to the transformation, got the state of a jdaso.chain that "
            "contains it: with tx = jdaso.chain(...), call jdaso.drain(tx, opt_state, params)."
        )
    state = find_state(transformation.state_type, opt_state)
    own = _exchanged(transformation.exchange, averaging_state(state), params)
    moved, state = transformation.finish(own, state)
    params = jax.tree.map(
        lambda new, old: old if is_masked(new) else new, *(moved, params), is_leaf=is_masked
    )
    return params, map_states(transformation.state_type, lambda _: state, opt_state)


def _exchanged(exchange: Exchange, state: AveragingState, params: PyTree) -> PyTree:
    """The parameters, with placeholders for those that the state does not know.

    Inside a wrapper such as ``optax.partition``, an averaging may have only some of them.
    """
    sent = [exchange.sent_leaves(fragment.exchange) for fragment in state.fragments]
    if any(leaves is None for leaves in sent):
        return params
    names = {leaf.name for leaves in sent if leaves for leaf in leaves}

    def choose(path: tuple[Any, ...], x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        # With averaged moments, the names are those of a ParamsWithMoments.
        known = not is_floating(x) or name in names or f".params{name}" in names
        return x if known else optax.MaskedNode()

    return jax.tree_util.tree_map_with_path(choose, params)
