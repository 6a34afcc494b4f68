"""The state of all algorithms, how to find it in an optimizer's state, and metrics from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdaso.core.types import Plan, PyTree


class FragmentState(NamedTuple):
    """The state of one fragment and of its exchange.

    Attributes:
        posted: bool, whether an exchange is in flight.
        age: int32, steps since it was posted.
        delay: int32, steps after which to merge it.
        number: int32, its number.
        healthy: bool, whether this node's parameters have been finite since the last merge.
        feedback: :class:`jdaso.core.error_feedback.Feedback`, or () without int8 and float4.
    """

    posted: jax.Array
    age: jax.Array
    delay: jax.Array
    number: jax.Array
    healthy: jax.Array
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


def averaging_state(opt_state: PyTree, params: PyTree = None) -> AveragingState:
    """Finds the state of the averaging in an optimizer's state, with any nesting.

    The error says if ``params`` and ``opt_state`` have been swapped.

    Raises:
        ValueError: if there is none, or more than one.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.daso(jdaso.single_exchange(), period=4, delay=2)
    >>> state = jdaso.chain(optax.sgd(0.1), averaging).init({"w": jnp.ones(3)})
    >>> int(jdaso.core.averaging_state(state).plan.period)
    4
    """
    return find_state(AveragingState, opt_state, params)


def find_state(kind: type, opt_state: PyTree, params: PyTree = None) -> Any:
    """The only state of a type in an optimizer's state. Raises ValueError for none or several."""
    found = find_states(kind, opt_state)
    if not found and find_states(kind, params):
        raise ValueError("params and opt_state have been swapped: pass opt_state, params.")
    if len(found) != 1:
        raise ValueError(
            f"opt_state holds {len(found)} states of the type {kind.__name__}, exactly one is "
            "required: pass the state of an optimizer with one such transformation."
        )
    return found[0]


def find_states(kind: type | tuple[type, ...], opt_state: PyTree) -> list[Any]:
    """All states of a type, or of several, in an optimizer's state. None is inside another."""

    def is_kind(node):
        return isinstance(node, kind)

    return [node for node in jax.tree.leaves(opt_state, is_leaf=is_kind) if is_kind(node)]


def map_states(kind: type, function: Callable[[Any], Any], opt_state: PyTree) -> PyTree:
    """The optimizer's state with ``function`` applied to all states of a type."""

    def is_kind(node):
        return isinstance(node, kind)

    return jax.tree.map(lambda x: function(x) if is_kind(x) else x, opt_state, is_leaf=is_kind)


class Metrics(NamedTuple):
    """What an averaging did up to the last step, and at this step. All fields are scalars.

    Attributes:
        step: int32, optimizer steps taken.
        phase: int32, index of :data:`jdaso.schedules.PHASES`.
        period: int32, as in :class:`jdaso.core.Plan`.
        delay: int32, as in :class:`jdaso.core.Plan`.
        in_flight: int32, exchanges in flight, at most one for each fragment.
        exchanges: int32, exchanges posted. It is also the number of the next one.
        merged: bool, whether a mean was merged at the last step, or by :func:`jdaso.drain` after
            it. It is false if no node has contributed, or if the sum was not finite.
        skipped: int32, steps that this node skipped, because its gradients were not finite. In an
            ``optax.chain``, the updates that the averaging gets count as the gradients.
        left_out: int32, exchanges to which this node did not contribute, because its parameters
            were not finite, or that were ignored, because their sum was not finite.
    """

    step: jax.Array
    phase: jax.Array
    period: jax.Array
    delay: jax.Array
    in_flight: jax.Array
    exchanges: jax.Array
    merged: jax.Array
    skipped: jax.Array
    left_out: jax.Array


def metrics(opt_state: PyTree) -> Metrics:
    """Finds the metrics of an averaging in an optimizer's state, without waiting for them.

    If the state is donated to the next step, call this function inside the training step and
    return the result. Outside, the result shares its arrays with the state.

    Args:
        opt_state: an optax state, with any nesting of chains and wrappers.

    Returns:
        :class:`jdaso.core.Metrics`, which explains the fields: arrays on the device.
        ``jax.device_get`` fetches all of them at once.

    Raises:
        ValueError: if the state holds no averaging, or more than one.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.dasgd(jdaso.single_exchange(), period=4, delay=2)
    >>> state = jdaso.chain(optax.sgd(0.1), averaging).init({"w": jnp.ones(3)})
    >>> int(jdaso.metrics(state).period), int(jdaso.metrics(state).in_flight)
    (4, 0)
    """
    state = averaging_state(opt_state)
    posted = jnp.stack([fragment.posted for fragment in state.fragments])
    return Metrics(
        step=state.step,
        phase=state.plan.phase,
        period=state.plan.period,
        delay=state.plan.delay,
        in_flight=jnp.sum(posted, axis=0, dtype=jnp.int32),
        exchanges=state.exchanges,
        merged=state.merged,
        skipped=state.skipped,
        left_out=state.left_out,
    )
