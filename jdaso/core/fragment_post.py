"""How a fragment is posted."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.core.block_format import format_of
from jdaso.core.consistency import agreement_numbers
from jdaso.core.engine_config import EngineConfig, StepContext, stop_unless_finite
from jdaso.core.error_feedback import FIRST_WIRE, Feedback, anchors, compress
from jdaso.core.exchange import AGREEMENT_NAMES
from jdaso.core.state import FragmentState
from jdaso.core.tree import finite_leaves, widened
from jdaso.core.types import Leaves, Plan, PyTree
from jdaso.core.wire import Wire, block_bits, describe_narrow_wires, round_to, wire_dtypes


def post_fragment(
    config: EngineConfig,
    context: StepContext,
    num_params: int,
    leaves: Leaves,
    fragment: FragmentState,
    number: jax.Array,
) -> tuple[Leaves, FragmentState, jax.Array]:
    """Posts a fragment. Returns its leaves, its state and the number of the next exchange.

    The leaves that are returned are ordered after the post, so that they may change in place.
    """
    merge = config.merge
    params, moments = leaves[:num_params], leaves[num_params:]
    message, new_state = merge.message(params, fragment.merge)
    message = [*message, *widened(moments)]  # in 16 bits, what is small may become 0
    agreement = _agreement(config, context, fragment)

    wires, choice = _wire_choice(config, context.plan, fragment.feedback)
    each = [_wire_of_leaves(config, wire, num_params, len(leaves)) for wire in wires]
    check = functools.partial(_check, config, context.step, message, fragment.sound)
    contribution = lax.switch(choice, [functools.partial(check, wire) for wire in each])
    sound = contribution > 0
    header = jnp.concatenate([contribution.astype(jnp.float32)[None], context.losses, agreement])
    sent = _Message(number, context.step, message, header)
    exchange_state, following, feedback = _send(config, fragment, sent, wires, each, choice)
    if config.bound.in_parts:
        # ``after`` makes the leaves depend on the post, so that later moves change them in place.
        whole = slice(0, len(leaves))
        exchange_state, [leaves] = config.bound.after(exchange_state, whole, [leaves])
        # Without the barrier, arrays that pass through this branch unchanged would make XLA copy
        # what the merge before the post has changed in place.
        new_state, feedback = lax.optimization_barrier((new_state, feedback))
    # A node that does not contribute must not move, because the sum does not contain its move.
    params, moments = leaves[:num_params], leaves[num_params:]
    moved = [
        jnp.where(sound, new, old)
        for new, old in zip(merge.on_post(params, new_state), params, strict=True)
    ]
    fragment = fragment._replace(
        age=jnp.zeros((), jnp.int32),
        delay=context.plan.delay,
        number=number,
        sound=sound,
        exchange=exchange_state,
        merge=new_state,
        feedback=feedback,
    )
    return [*moved, *moments], fragment, following


def _wire_of_leaves(config: EngineConfig, wire: str | None, num_params: int, count: int) -> Wire:
    """The wire of all leaves, or one for each if there are moments, which have their own."""
    moments = (config.moments_wire,) * (count - num_params)
    return (*[wire] * num_params, *moments) if moments else wire


def _check(
    config: EngineConfig,
    step: jax.Array,
    message: Leaves,
    sound: jax.Array,
    wire: Wire,
) -> jax.Array:
    """The first number of the header, int32; a node contributes if its message is finite."""
    wires = wire_dtypes([x.dtype for x in message], wire)
    leaves = [_like_on_wire(x, dtype) for x, dtype in zip(message, wires, strict=True)]
    finite = config.exchange.all_devices(finite_leaves(leaves))
    narrow = describe_narrow_wires(wires)
    whole = stop_unless_finite(config, finite, step, narrow, config.names)
    return jnp.where(whole, sound.astype(jnp.int32), -1 - jnp.argmin(finite).astype(jnp.int32))


class _Message(NamedTuple):
    """Arguments of ``start`` of an exchange."""

    number: jax.Array
    step: jax.Array
    leaves: Leaves
    header: jax.Array


def _send(
    config: EngineConfig,
    fragment: FragmentState,
    sent: _Message,
    wires: list[str | None],
    each: list[Wire],
    choice: jax.Array,
) -> tuple[PyTree, jax.Array, Feedback | tuple[()]]:
    """Posts a message on the chosen one of ``wires``. ``each`` has the wires of the leaves for it.

    Returns the state of the exchange, the number of the next one, and the feedback.
    """
    exchange, feedback = config.bound, fragment.feedback
    if not feedback:
        options: dict[str, Any] = {"relative": True} if config.merge.relative else {}

        def start(wire, state):
            return exchange.start(state, *sent, wire, **options)

        state, following = lax.switch(
            choice, [functools.partial(start, wire) for wire in each], fragment.exchange
        )
        return state, following, feedback

    anchor = anchors(config.merge, fragment.merge, feedback)
    count = len(feedback.residual)  # of the parameters; moments have no feedback

    def start_compressed(wire, of_leaves, state, residual):
        run = exchange.per_shard(functools.partial(compress, wire), slice(0, count))
        rounded, residual = run(sent.header[0] > 0, sent.leaves[:count], residual, anchor)
        message = sent._replace(leaves=[*rounded, *sent.leaves[count:]])
        return *exchange.start(state, *message, of_leaves), residual

    state, following, residual = lax.switch(
        choice,
        [functools.partial(start_compressed, *pair) for pair in zip(wires, each, strict=True)],
        *(fragment.exchange, feedback.residual),
    )
    bits = _block_bits(wires)[choice]
    return state, following, feedback._replace(residual=residual, block_bits=bits)


def _block_bits(wires: list[str | None]) -> jax.Array:
    return jnp.array([block_bits(wire) for wire in wires], jnp.int32)


def _like_on_wire(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """An array that is finite if the array is in its wire dtype. Rows are always finite."""
    if format_of(dtype):
        return x
    if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
        # Numbers that bfloat16 cannot hold overflow in this product, which is faster than to round.
        return x * (float(jnp.finfo(x.dtype).max) / float(jnp.finfo(dtype).max))
    return round_to(x, dtype)


def _agreement(config: EngineConfig, context: StepContext, fragment: FragmentState) -> jax.Array:
    """The agreement numbers of the header, zeros if the exchange does not compare them."""
    if not config.exchange.compares:
        return jnp.zeros((len(AGREEMENT_NAMES),), jnp.float32)
    shared: PyTree = ()
    if config.exchange.same_bits:
        # int8 and float4 send differences from anchors, so they would never correct a wrong anchor.
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
        no_anchor = (_block_bits(wires)[choice] > 0) & ~feedback.anchor_ready
        choice = jnp.where(no_anchor, wires.index(FIRST_WIRE), choice)
    return wires, choice
