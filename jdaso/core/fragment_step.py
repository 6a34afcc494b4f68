"""What happens to one fragment when its exchange is posted, merged, or both."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdaso.core.consistency import agreement_numbers
from jdaso.core.error_feedback import FIRST_WIRE, Feedback, compress, decompress, store_residual
from jdaso.core.state import FragmentState
from jdaso.core.sync_target import SyncTarget
from jdaso.core.tree import all_finite, divide, where_tree
from jdaso.core.types import (
    AGREEMENT_NAMES,
    Arrival,
    Exchange,
    JdasoError,
    Leaves,
    Merge,
    Plan,
    PyTree,
    Schedule,
)
from jdaso.core.wire import describe_narrow_wires, wire_dtype


class EngineConfig(NamedTuple):
    """The arguments of :func:`jdaso.core.averaging`, which document the fields."""

    name: str
    exchange: Exchange
    schedule: Schedule
    merge: Merge
    wire: str | None
    blocking_wire: str | None
    nonfinite: str
    fragments: int
    sync_target: SyncTarget


class StepContext(NamedTuple):
    """What a fragment needs to know about the step.

    Attributes:
        schedule: the schedule's state.
        replicated: parameters that must be the same on all nodes, or ().
        losses: float32[2], sum and number of this node's losses in this epoch.
        due: bool, whether to merge the exchange in flight.
        post: bool, whether to post the fragment.
    """

    step: jax.Array
    plan: Plan
    schedule: PyTree
    replicated: PyTree
    losses: jax.Array
    due: jax.Array
    post: jax.Array


class FragmentResult(NamedTuple):
    """What the engine needs to know about the fragment.

    Attributes:
        number: int32, the number of the next exchange.
        left_out: int32, exchanges without this node, or with a sum that is not finite.
        losses: float32[2], sum and number of the losses of all nodes if a blocking exchange has
            ended, otherwise zeros.
    """

    number: jax.Array
    left_out: jax.Array
    losses: jax.Array


def step_fragment(
    config: EngineConfig,
    context: StepContext,
    num_params: int,
    leaves: Leaves,
    fragment: FragmentState,
    number: jax.Array,
) -> tuple[Leaves, FragmentState, FragmentResult]:
    """Merges the exchange in flight and posts the fragment, as ``context`` says.

    The first ``num_params`` leaves are parameters, the others are optimizer moments. ``number`` is
    that of the next exchange.
    """

    def collect(leaves, fragment):
        return merge_fragment(config, context.step, num_params, leaves, fragment)

    def skip(leaves, fragment):
        return leaves, fragment, jnp.zeros((), bool), jnp.zeros((2,), jnp.float32)

    leaves, fragment, lost, _ = lax.cond(context.due, collect, skip, leaves, fragment)
    leaves, fragment, number = lax.cond(
        context.post,
        lambda x, f: post_fragment(config, context, num_params, x, f, number),
        lambda x, f: (x, f, number),
        leaves,
        fragment,
    )
    unsound = context.post & ~fragment.sound
    at_once = context.post & (context.plan.delay == 0)
    leaves, fragment, lost_at_once, losses = lax.cond(at_once, collect, skip, leaves, fragment)
    left_out = jnp.sum(jnp.stack([lost, unsound, lost_at_once]), dtype=jnp.int32)
    return leaves, fragment, FragmentResult(number, left_out, losses)


def skip_fragment(
    leaves: PyTree, fragment: PyTree, number: jax.Array
) -> tuple[PyTree, PyTree, FragmentResult]:
    """Changes nothing."""
    return (
        leaves,
        fragment,
        FragmentResult(number, jnp.zeros((), jnp.int32), jnp.zeros((2,), jnp.float32)),
    )


def post_fragment(
    config: EngineConfig,
    context: StepContext,
    num_params: int,
    leaves: Leaves,
    fragment: FragmentState,
    number: jax.Array,
) -> tuple[Leaves, FragmentState, jax.Array]:
    """Posts a fragment. Returns its leaves, its state and the number of the next exchange."""
    merge = config.merge
    params, moments = leaves[:num_params], leaves[num_params:]
    message, merge_state = merge.message(params, fragment.merge)
    message = [*message, *moments]
    agreement = _agreement(config, context, fragment)

    def post(wire: str | None, state: PyTree, feedback: PyTree):
        if feedback:
            shrink = config.exchange.per_shard(functools.partial(_compress, wire))
            compressed, residual = shrink(message, feedback)
            finite = all_finite(residual)
        else:
            compressed = message
            finite = all_finite([x.astype(wire_dtype(x.dtype, wire)) for x in message])
        wires = [wire_dtype(x.dtype, wire) for x in message]
        narrow = describe_narrow_wires(wires)
        finite = config.exchange.all_devices(finite)
        sound = fragment.sound & stop_unless_finite(config, finite, context.step, narrow)
        if feedback:
            feedback = store_residual(feedback, residual, sound, wire)
        header = jnp.concatenate([sound.astype(jnp.float32)[None], context.losses, agreement])
        state, following = config.exchange.start(
            state, number, context.step, compressed, header, wire
        )
        return state, following, sound, feedback

    wires, choice = _wire_choice(config, context.plan, fragment.feedback)
    exchange_state, following, sound, feedback = lax.switch(
        choice,
        [functools.partial(post, wire) for wire in wires],
        fragment.exchange,
        fragment.feedback,
    )
    fragment = fragment._replace(
        posted=jnp.ones((), bool),
        age=jnp.zeros((), jnp.int32),
        delay=context.plan.delay,
        number=number,
        sound=sound,
        exchange=exchange_state,
        merge=merge_state,
        feedback=feedback,
    )
    # A node that does not contribute must not move, because the sum does not contain its move.
    moved = [
        jnp.where(sound, new, old)
        for new, old in zip(merge.on_post(params, fragment.merge), params, strict=True)
    ]
    return [*moved, *moments], fragment, following


def merge_fragment(
    config: EngineConfig, step: jax.Array, num_params: int, leaves: Leaves, fragment: FragmentState
) -> tuple[Leaves, FragmentState, jax.Array, jax.Array]:
    """Waits for the sums of a posted fragment and merges them.

    Returns the leaves, the fragment's state, whether the sums were not finite, and sum and number
    of the losses of all nodes.
    """
    merge = config.merge
    total, header, exchange_state = config.exchange.finish(
        fragment.exchange, fragment.number, leaves
    )
    members, feedback = header[0], fragment.feedback
    if feedback:
        expand = config.exchange.per_shard(decompress)
        total, mean, feedback = expand(total, members, feedback)
    else:
        mean = [divide(t, jnp.maximum(members, 1).astype(t.dtype)) for t in total]
    # Large finite numbers may add up to infinity. The sums are the same on all nodes.
    finite = config.exchange.all_devices(all_finite(total))
    lost = ~stop_unless_finite(config, finite, step)
    no_result = lost | (members == 0)
    wide = [x.astype(t.dtype) for x, t in zip(leaves, total, strict=True)]
    # A node whose parameters are not finite continues from the mean of the others.
    wide = [jnp.where(fragment.sound, x, m) for x, m in zip(wide, mean, strict=True)]
    arrival = Arrival(total[:num_params], mean[:num_params], members, fragment.age, fragment.sound)
    merged, merge_state = merge.merge(wide[:num_params], arrival, fragment.merge)
    moments = []
    if merge.own_weight is not None:
        w = merge.own_weight(arrival)
        moments = [
            w * x + (1 - w) * m for x, m in zip(wide[num_params:], mean[num_params:], strict=True)
        ]
    leaves = [
        jnp.where(no_result, config.sync_target.fallback(x), m.astype(x.dtype))
        for x, m in zip(leaves, [*merged, *moments], strict=True)
    ]
    fragment = fragment._replace(
        posted=jnp.zeros((), bool),
        sound=jnp.ones((), bool),
        exchange=exchange_state,
        merge=where_tree(no_result, fragment.merge, merge_state),
        feedback=where_tree(lost, fragment.feedback, feedback),
    )
    return leaves, fragment, lost, header[1:3]


def _compress(wire: str | None, message: Leaves, feedback: Feedback) -> tuple[Leaves, Leaves]:
    return compress(message, wire, feedback)


def stop_unless_finite(
    config: EngineConfig, finite: jax.Array, step: jax.Array, narrow: str = ""
) -> jax.Array:
    """Returns ``finite``. Raises JdasoError if it is False and ``nonfinite`` is ``raise``.

    ``narrow`` is what :func:`describe_narrow_wires` says.
    """

    def stop():
        # io_callback raises in a cond under vmap, so debug.callback.
        check = functools.partial(_raise_unless_finite, config.name, narrow)
        jax.debug.callback(check, finite, step)

    if config.nonfinite == "raise":
        lax.cond(finite, lambda: None, stop)
    return finite


def _raise_unless_finite(name, narrow, finite, step):
    if not finite:
        raise JdasoError(
            f"{name}: updates or parameters are not finite at step {int(step)}{narrow}, or their "
            "sum over the nodes is not. Lower the learning rate, or use nonfinite='skip' to skip "
            "the step and leave this node out of the next exchange."
        )


def _agreement(config: EngineConfig, context: StepContext, fragment: FragmentState) -> jax.Array:
    """The agreement numbers of the header, zeros if the exchange does not compare them."""
    if not config.exchange.compares:
        return jnp.zeros((len(AGREEMENT_NAMES),), jnp.float32)
    shared: PyTree = ()
    if config.exchange.same_bits:
        # The wire int8 sends differences to anchors, so it would never correct a wrong anchor.
        anchor = fragment.feedback.anchor if fragment.feedback else ()
        shared = (context.replicated, fragment.merge if config.merge.shared else (), anchor)
    return agreement_numbers(context.plan, context.schedule, shared)


def _wire_choice(
    config: EngineConfig, plan: Plan, feedback: Feedback | tuple[()]
) -> tuple[list[str | None], jax.Array]:
    """The wires that a fragment may use, and the index of the one to use now."""
    wires = list(dict.fromkeys([config.wire, config.blocking_wire]))
    # The index is equal on all nodes, because it depends only on what is equal on all nodes.
    choice = jnp.where(plan.blocking, wires.index(config.blocking_wire), wires.index(config.wire))
    if feedback and feedback.anchor:
        wires = list(dict.fromkeys([*wires, FIRST_WIRE]))
        no_anchor = (choice == wires.index("int8")) & ~feedback.anchor_ready
        choice = jnp.where(no_anchor, wires.index(FIRST_WIRE), choice)
    return wires, choice
