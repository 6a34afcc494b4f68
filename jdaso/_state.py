"""The state of every algorithm, and where to find it inside an optimizer's."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jdaso._base import Plan, PyTree


class Flight(NamedTuple):
    """The exchange in the air: whether there is one, its age, the delay it was posted with."""

    posted: jax.Array
    age: jax.Array
    delay: jax.Array


class AveragingState(NamedTuple):
    """State of every algorithm; arrays only, their shapes and dtypes never change.

    Attributes:
        step: int32, optimizer steps taken.
        exchanges: int32, exchanges posted so far; the number of the next one.
        sound: bool, whether this node's numbers have been finite since the last merge.
        skipped: int32, steps of this node that were skipped: their updates were not finite.
        left_out: int32, exchanges to which this node did not contribute, as it was not sound.
        flight: what is in the air.
        plan: what the schedule asked for at the last step.
        losses: float32[2], sum and number of the losses seen in this epoch.
        schedule, exchange, merge: states of the three parts.
    """

    step: jax.Array
    exchanges: jax.Array
    sound: jax.Array
    skipped: jax.Array
    left_out: jax.Array
    flight: Flight
    plan: Plan
    losses: jax.Array
    schedule: PyTree
    exchange: PyTree
    merge: PyTree


def averaging_state(opt_state: PyTree) -> AveragingState:
    """Finds the one state of a jdaso algorithm inside an optimizer's state.

    The numbers one watches are its fields: ``step``, ``exchanges``, ``left_out``,
    ``skipped``, ``flight.posted``, and ``plan.phase``, ``plan.period``, ``plan.delay``.

    Args:
        opt_state: an optax state, however deeply chained or wrapped.

    Raises:
        ValueError: if there is none, or more than one.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.daso(jdaso.single_exchange(), jdaso.constant(period=4, delay=2))
    >>> state = optax.chain(optax.sgd(0.1), averaging).init({"w": jnp.ones(3)})
    >>> int(jdaso.averaging_state(state).plan.period)
    4
    """
    found = [
        node
        for node in jax.tree.leaves(
            opt_state, is_leaf=lambda node: isinstance(node, AveragingState)
        )
        if isinstance(node, AveragingState)
    ]
    if len(found) != 1:
        raise ValueError(
            f"opt_state holds {len(found)} states of a jdaso algorithm, exactly one is needed."
        )
    return found[0]
