"""The state of every algorithm, and where to find it inside an optimizer's."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jdaso._base import Plan, PyTree


class Flight(NamedTuple):
    """An exchange in the air, or the place of the next; there is one for each fragment.

    Attributes:
        posted: bool, whether there is one.
        age: int32, steps since it was posted.
        delay: int32, steps after which it is to be merged.
        number: int32, which exchange it is.
        sound: bool, whether this node's numbers have been finite since the last merge.
        exchange, merge: states of these two parts.
        feedback: what rounding has taken away, see ``_feedback.py``; () unless the wire is int8.
    """

    posted: jax.Array
    age: jax.Array
    delay: jax.Array
    number: jax.Array
    sound: jax.Array
    exchange: PyTree
    merge: PyTree
    feedback: PyTree = ()


class AveragingState(NamedTuple):
    """State of every algorithm; arrays only, their shapes and dtypes never change.

    Attributes:
        step: int32, optimizer steps taken.
        exchanges: int32, exchanges posted so far; the number of the next one.
        skipped: int32, steps of this node that were skipped: their updates were not finite, or
            parameters would not have been.
        left_out: int32, exchanges to which this node did not contribute, as it was not sound, or
            that brought nothing, as their sum was not finite.
        merged: bool, whether an exchange ended at the last step.
        plan: what the schedule asked for at the last step.
        losses: float32[2], sum and number of the losses seen in this epoch.
        schedule: the schedule's own state.
        flights: what is in the air, one for each fragment.
    """

    step: jax.Array
    exchanges: jax.Array
    skipped: jax.Array
    left_out: jax.Array
    merged: jax.Array
    plan: Plan
    losses: jax.Array
    schedule: PyTree
    flights: tuple[Flight, ...]


def averaging_state(opt_state: PyTree) -> AveragingState:
    """Finds the one state of a jdaso algorithm inside an optimizer's state.

    The numbers one watches are its fields: ``step``, ``exchanges``, ``left_out``,
    ``skipped``, ``flights[0].posted``, and ``plan.phase``, ``plan.period``, ``plan.delay``.

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
    return the_state(AveragingState, opt_state)


def the_state(kind: type, opt_state: PyTree) -> Any:
    """The one state of a type inside an optimizer's state.

    Raises:
        ValueError: if there is none, or more than one.
    """
    found = all_states(kind, opt_state)
    if len(found) != 1:
        raise ValueError(
            f"opt_state holds {len(found)} states of the type {kind.__name__}, exactly one is "
            "needed."
        )
    return found[0]


def all_states(kind: type, opt_state: PyTree) -> list[Any]:
    """The states of a type inside an optimizer's state, but for those inside one another."""

    def is_one(node):
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_one) if is_one(node)]
