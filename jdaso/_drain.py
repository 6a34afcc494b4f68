"""Landing what is in flight: at the end of training, before a checkpoint."""

from __future__ import annotations

import jax

from jdaso._base import PyTree
from jdaso._engine import Averaging
from jdaso._memory import MemoryState
from jdaso._state import AveragingState, all_states, the_state


def drain(transformation: Averaging, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Merges what is in flight, with its actual age; without a flight, changes nothing.

    For the end of training under a schedule that does not know it, and before a checkpoint.

    Args:
        transformation: what ``jdaso.daso(...)`` (or a relative) or ``jdaso.chain(...)``
            returned; if it is one member of an ``optax.chain``, the member.
        opt_state: the whole optimizer's state.
        params: the node's parameters.

    Returns:
        ``(params, opt_state)`` with nothing in flight.

    Raises:
        ValueError: if the transformation is something else, or ``opt_state`` does not hold
            exactly one state of it.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.daso(jdaso.single_exchange(), jdaso.constant(period=4, delay=2))
    >>> tx = optax.chain(optax.sgd(0.1), averaging)
    >>> params = {"w": jnp.ones(3)}
    >>> params, state = jdaso.drain(averaging, tx.init(params), params)
    """
    if not isinstance(transformation, Averaging):
        raise ValueError(
            "drain needs what jdaso.daso(...) or a relative, or jdaso.chain(...), returned, not "
            "an optax.chain around it: give it a name before you chain it."
        )
    if transformation.state_type is AveragingState and all_states(MemoryState, opt_state):
        raise ValueError(
            "opt_state is that of a jdaso.chain, not of its member: with tx = jdaso.chain(...), "
            "call jdaso.drain(tx, opt_state, params)."
        )
    params, state = transformation.finish(params, the_state(transformation.state_type, opt_state))

    def is_state(node):
        return isinstance(node, transformation.state_type)

    return params, jax.tree.map(
        lambda node: state if is_state(node) else node, opt_state, is_leaf=is_state
    )
