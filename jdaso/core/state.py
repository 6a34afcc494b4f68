"""The state of all algorithms, and functions that find it in an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jdaso.core.types import Plan, PyTree


class FragmentState(NamedTuple):
    """The state of one fragment and of its exchange.

    Attributes:
        posted: bool, whether an exchange is in flight.
        age: int32, steps since it was posted.
        delay: int32, steps after which to merge it.
        number: int32, its number.
        sound: bool, whether this node's parameters have been finite since the last merge.
        feedback: :class:`jdaso.core.error_feedback.Feedback`, or () without int8 and float4.
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
    """The state of one averaging, of the same type for every algorithm.

    The fields ``step``, ``exchanges``, ``skipped``, ``left_out`` and ``merged`` are those of
    :class:`jdaso.core.Metrics`.

    Attributes:
        plan: what the schedule requested at the last step.
        losses: float32[2], sum and number of this node's losses in this epoch.
        schedule: state of the schedule.
        fragments: the state of each fragment.
    """

    step: jax.Array
    exchanges: jax.Array
    skipped: jax.Array
    left_out: jax.Array
    merged: jax.Array
    plan: Plan
    losses: jax.Array
    schedule: PyTree
    fragments: tuple[FragmentState, ...]


def averaging_state(opt_state: PyTree) -> AveragingState:
    """Finds the state of the averaging in an optimizer's state, with any nesting.

    Raises:
        ValueError: if there is none, or more than one.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.daso(jdaso.single_exchange(), jdaso.constant(period=4, delay=2))
    >>> state = jdaso.chain(optax.sgd(0.1), averaging).init({"w": jnp.ones(3)})
    >>> int(jdaso.core.averaging_state(state).plan.period)
    4
    """
    return find_state(AveragingState, opt_state)


def find_state(kind: type, opt_state: PyTree) -> Any:
    """The only state of a type in an optimizer's state. Raises ValueError for none or several."""
    found = find_states(kind, opt_state)
    if len(found) != 1:
        raise ValueError(
            f"opt_state holds {len(found)} states of the type {kind.__name__}, exactly one is "
            "required: pass the state of an optimizer with one such transformation."
        )
    return found[0]


def find_states(kind: type, opt_state: PyTree) -> list[Any]:
    """All states of a type in an optimizer's state, without those inside one another."""

    def is_kind(node):
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_kind) if is_kind(node)]


def map_states(kind: type, function: Callable[[Any], Any], opt_state: PyTree) -> PyTree:
    """The optimizer's state with ``function`` applied to all states of a type."""

    def is_kind(node):
        return isinstance(node, kind)

    return jax.tree.map(lambda x: function(x) if is_kind(x) else x, opt_state, is_leaf=is_kind)
