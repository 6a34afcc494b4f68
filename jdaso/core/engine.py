"""The engine of all algorithms: makes an optax transformation of schedule, exchange and merge.

After the local optimizer's update of a step, the engine changes the parameters in place. It does
the following for each fragment of the parameters:

1. It posts the parameters, if an exchange is due.
2. It merges the exchange in flight, if its delay has passed, if the next exchange is due, or if
   the schedule requests to complete all exchanges.
3. It merges the exchange of this step, if its delay is 0.

At all other steps the parameters pass unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdaso.core.block_format import FORMATS
from jdaso.core.engine_config import EngineConfig, StepContext, planned, stop_unless_finite
from jdaso.core.exchange import Exchange
from jdaso.core.fragment_merge import merge_fragment, no_arrival
from jdaso.core.fragment_step import FragmentResult, skip_fragment, step_fragment, step_updates
from jdaso.core.fragments import Fragments, float_positions, num_parameters
from jdaso.core.initial_state import init_state
from jdaso.core.optimizer_step import link
from jdaso.core.state import AveragingState
from jdaso.core.sync_target import AFTER_UPDATE, SyncTarget
from jdaso.core.transformation import Averaging, Engine
from jdaso.core.tree import conditional, finite_leaves, float_leaves, named_floats, where_tree
from jdaso.core.types import Merge, PyTree, Schedule
from jdaso.core.validation import check_choice, check_fragments, check_schedule
from jdaso.core.wire import sum_dtype


def averaging(
    name: str,
    exchange: Exchange,
    schedule: Schedule,
    merge: Merge,
    wire: str | None = None,
    blocking_wire: str | None = None,
    nonfinite: str = "skip",
    fragments: Fragments = 1,
    sync_target: SyncTarget = AFTER_UPDATE,
) -> Averaging:
    """Makes an optax transformation of a schedule, an exchange and a merge.

    Args:
        name: name of the algorithm, for error messages.
        exchange: how nodes communicate.
        schedule: when to post and when to merge.
        merge: how the sums change the parameters.
        wire: dtype name on the wire, or None for the dtype of each leaf. With int8 or float4 the
            state holds error feedback: two float32 copies of the parameters, or one of the
            gradients, and with EASGD and DiLoCo.
        blocking_wire: the wire of steps whose plan is ``blocking``.
        nonfinite: what to do if gradients are not finite. ``skip`` skips the step and leaves the
            node out of the next sum. The node then takes the mean of the others. The state counts
            both. ``raise`` raises an error. ``off`` does not read the gradients. Parameters that
            are not finite are found when they are posted. The node is then left out as well,
            unless ``nonfinite`` is ``raise``. A sum that is not finite, because large numbers
            overflow, is ignored by all nodes and counted.
        fragments: number of parts of about equal bytes that the parameters are cut into, or a
            function that returns the index of its part for the path of a leaf. Each part is
            exchanged once in a period, at different steps, so that the load of the network is even.
        sync_target: what is exchanged.

    Returns:
        An :class:`Averaging`, for :func:`jdaso.chain`. It is an optax transformation as well. It
        must then come last in a chain, and its ``update`` requires ``params``, unless
        ``sync_target`` is ``GRADIENTS``.

    Raises:
        ValueError: for another ``nonfinite``, or for more fragments than steps in a period. In
            ``init``, for more fragments than floating-point leaves.
    """
    check_choice("nonfinite", nonfinite, ("skip", "raise", "off"))
    check_schedule(name, schedule)
    if not callable(fragments):
        check_fragments(fragments, schedule)
    if merge.relative and (rounds := {wire, blocking_wire} & {*FORMATS}):
        raise ValueError(
            f"{name}: the wire {rounds.pop()} sends differences from an anchor, and does not "
            'go with a merge that adds the mean\'s change, as merge="delta" does: use the wire '
            "float32, or bfloat16, which rounds the sum of each merge."
        )
    if merge.base is not None and not merge.shared:
        raise ValueError(f"{name}: a merge with a base must be shared, because all nodes use it.")
    if not schedule.may_block:
        blocking_wire = wire  # so that the program has no code for the other one
    config = EngineConfig(
        name, exchange, schedule, merge, wire, blocking_wire, nonfinite, fragments, sync_target
    )
    engine = Engine(
        name,
        sync_target,
        functools.partial(_guard, config),
        functools.partial(_move, config),
        moves_moments=merge.own_weight is not None,
    )
    init, finish = functools.partial(init_state, config), functools.partial(_finish, config)
    return link(engine, exchange, init, jax.jit(finish))


def _guard(config: EngineConfig, grads: PyTree, state: AveragingState) -> jax.Array:
    """Whether all gradients are finite, in one pass over them."""
    if config.nonfinite == "off":
        return jnp.bool_(True)
    finite = config.exchange.all_devices(finite_leaves(float_leaves(grads)))
    names = [name for name, _ in named_floats(grads)]
    return stop_unless_finite(config, finite, state.step, names=names)


def _move(
    config: EngineConfig,
    tree: PyTree,
    state: AveragingState,
    finite: jax.Array,
    value: Any = None,
    replicated: PyTree = (),
    origin: PyTree = None,
    moments_wire: str | None = None,
) -> tuple[PyTree, AveragingState]:
    """Merges and posts what is due, in one conditional that leaves the tree in place.

    Args:
        tree: what is exchanged, such as the parameters after the optimizer's update.
        finite: bool scalar, whether the gradients of this step were finite.
        value: the loss, or None.
        replicated: arrays that must be the same on all nodes.
        origin: the parameters, if the tree has updates in their place.
        moments_wire: as in :func:`jdaso.chain`.

    Returns:
        The tree and the new state. If ``origin`` is given, the tree holds updates, and ``origin``
        plus the updates are the merged parameters.
    """
    config = config._replace(moments_wire=moments_wire)
    target = config.sync_target
    leaves, treedef = jax.tree.flatten(tree)
    started = state.step >= target.schedule_lag
    plan, scheduled = planned(config, state.schedule, state.step - target.schedule_lag)
    plan = plan._replace(flush=plan.flush & started, epoch_end=plan.epoch_end & started)
    # If the schedule lags, this step's loss belongs to the schedule's next step.
    loss = _loss(value)
    losses = state.losses if target.schedule_lag else state.losses + loss

    fragments, contexts = [], []
    for index, fragment in enumerate(state.fragments):
        fragment = fragment._replace(
            age=fragment.age + fragment.posted, sound=fragment.sound & finite
        )
        post = started & plan.posts(index, len(state.fragments))
        due = fragment.posted & ((fragment.age >= fragment.delay) | post | plan.flush)
        fragments.append(fragment)
        contexts.append(
            StepContext(state.step, plan, state.schedule, replicated, losses, due, post)
        )
    like = tree if origin is None else origin
    positions_of = float_positions(like, config.fragments)
    steps = [
        _step(config, context, like, positions, origin is not None)
        for context, positions in zip(contexts, positions_of, strict=True)
    ]

    def exchange(parts, fragments, number):
        left_out, observed = jnp.zeros((), jnp.int32), jnp.zeros((2,), jnp.float32)
        merged = jnp.zeros((), bool)
        for i, context in enumerate(contexts):
            step = steps[i]
            if len(contexts) > 1:  # of one fragment, the conditional around all is enough
                active = context.due | context.post
                step = functools.partial(lax.cond, active, step, skip_fragment)
            parts[i], fragments[i], result = step(parts[i], fragments[i], number)
            number, left_out = result.number, left_out + result.left_out
            merged = merged | result.merged
            observed = result.losses if i == 0 else observed
        return parts, fragments, FragmentResult(number, left_out, observed, merged)

    active = jnp.stack([context.due | context.post for context in contexts]).any()
    parts = [[leaves[i] for i in positions] for positions in positions_of]
    parts, fragments, result = conditional(
        config.name, active, exchange, skip_fragment, parts, fragments, state.exchanges
    )
    for positions, part_leaves in zip(positions_of, parts, strict=True):
        for i, x in zip(positions, part_leaves, strict=True):
            leaves[i] = x

    # Sum and number of the epoch's losses over all nodes have the same bits on every node.
    observes = plan.epoch_end & ~plan.blocking & (result.losses[1] > 0)
    observed = config.schedule.observe(
        scheduled, result.losses[0] / jnp.maximum(result.losses[1], 1)
    )
    state = AveragingState(
        step=state.step + 1,
        exchanges=result.number,
        skipped=state.skipped + ~finite,
        left_out=state.left_out + result.left_out,
        merged=result.merged,
        plan=plan,
        losses=jnp.where(plan.epoch_end, 0.0, losses) + (loss if target.schedule_lag else 0.0),
        schedule=where_tree(observes, observed, scheduled),
        fragments=tuple(fragments),
    )
    return jax.tree.unflatten(treedef, leaves), state


def _finish(
    config: EngineConfig, params: PyTree, state: AveragingState
) -> tuple[PyTree, AveragingState]:
    xs, treedef = jax.tree.flatten(params)
    new_fragments, left_out, merged = [], state.left_out, jnp.zeros((), bool)
    in_flight = jnp.stack([fragment.posted for fragment in state.fragments]).any()
    positions_of = float_positions(params, config.fragments)
    for positions, fragment in zip(positions_of, state.fragments, strict=True):
        own, count = _bound(config, params, positions)
        leaves, fragment, arrived = lax.cond(
            fragment.posted,
            lambda x, f, n=count, c=own: merge_fragment(c, state.step, n, x, f),
            lambda x, f: (x, f, no_arrival()),
            [xs[i] for i in positions],
            fragment,
        )
        left_out, merged = left_out + arrived.lost, merged | arrived.usable
        fragment = fragment._replace(
            posted=jnp.zeros((), bool), sound=fragment.sound | fragment.posted
        )
        for i, x in zip(positions, leaves, strict=True):
            xs[i] = x
        new_fragments.append(fragment)
    merged = jnp.where(in_flight, merged, state.merged)
    state = state._replace(fragments=tuple(new_fragments), left_out=left_out, merged=merged)
    return jax.tree.unflatten(treedef, xs), state


def _step(
    config: EngineConfig, context: StepContext, tree: PyTree, positions: list[int], updates: bool
) -> Callable:
    """A function that merges and posts a fragment of a tree, or of updates of it."""
    bound, count = _bound(config, tree, positions)
    if not updates:
        return functools.partial(step_fragment, bound, context, count)
    leaves = jax.tree.leaves(tree)
    return functools.partial(step_updates, bound, context, [leaves[i] for i in positions[:count]])


def _bound(config: EngineConfig, tree: PyTree, positions: list[int]) -> tuple[EngineConfig, int]:
    """The configuration with the exchange of some leaves, and how many of them are parameters."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(named[i][0]) for i in positions]
    count = sum(i < num_parameters(tree) for i in positions)
    leaves: list[Any] = [named[i][1] for i in positions]
    # Moments are posted in the dtype of their sum.
    leaves[count:] = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype)) for x in leaves[count:]]
    bound = config.exchange.bind(names, leaves)
    return config._replace(bound=bound, names=tuple(names)), count


def _loss(value: Any) -> jax.Array:
    """A loss and its number, 1. Zeros if the loss is missing or not finite."""
    if value is None:
        return jnp.zeros((2,), jnp.float32)
    value = jnp.asarray(value, jnp.float32)
    return jnp.where(jnp.isfinite(value), jnp.stack([value, jnp.ones_like(value)]), 0.0)
