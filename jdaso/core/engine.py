"""The engine of all algorithms: what an averaging does to a node's parameters at a step.

An algorithm combines a schedule, an exchange and a merge rule. At the end of a step, :func:`move`
asks the schedule what is due, and does the following for each fragment of the parameters:

1. It posts the parameters, if an exchange is due.
2. It merges the exchange in flight, if its delay has passed, if the next exchange is due, or if
   the schedule requests to complete all exchanges.
3. It merges the exchange of this step, if its delay is 0.

At all other steps the parameters pass unchanged. All of it happens in one conditional, and XLA
changes donated parameters in their places, as long as nothing reads an old array after its new one
has been computed. Much of this file is written so that nothing does. It reads in the order of a
step: the configuration, the state at the start, the plan, one fragment, its post, its merge. At the
end, :func:`finish` completes what is in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.core.error_feedback import FIRST_WIRE, compress, decompress_part, init_feedback
from jdaso.core.exchange import (
    AGREEMENT_NAMES,
    FINITE,
    HEADER_SIZE,
    LOSSES,
    MEMBERS,
    OWN,
    BoundExchange,
    Exchange,
    agreement_numbers,
    is_usable,
)
from jdaso.core.state import AveragingState, FragmentState
from jdaso.core.tree import (
    Fragments,
    change_if,
    check_arrays,
    check_finite,
    cut,
    difference,
    division_by,
    float_leaves,
    float_positions,
    helpful_errors,
    is_placeholder,
    named_floats,
    near_equal,
    part_of,
    split_state,
    where_tree,
    widened,
)
from jdaso.core.types import (
    Arrival,
    JdasoError,
    Leaves,
    Merge,
    Number,
    ParamsWithMoments,
    Plan,
    PyTree,
    Schedule,
    SyncTarget,
    keep_leaves,
    send_leaves,
)
from jdaso.core.validation import check_fragments
from jdaso.core.wire import (
    block_bits,
    describe_narrow_wires,
    finite_like_packed,
    round_to,
    sum_dtype,
    wire_dtypes,
)

# ---------------------------------------------------------------------------- The configuration


class Engine(NamedTuple):
    """The configuration of an averaging.

    Attributes:
        name, exchange, schedule, merge, wire, blocking_wire, nonfinite, fragments, sync_target: the
            arguments of :func:`jdaso.core.averaging`.
        moments_wire: that of :func:`jdaso.chain`.
        names: the names of the leaves of a fragment.
        bound: the exchange of these leaves.
        num_params: how many of them are parameters. The others, moments of the optimizer, follow.
    """

    name: str
    exchange: Exchange
    schedule: Schedule
    merge: Merge
    wire: str | None
    blocking_wire: str | None
    nonfinite: str
    fragments: Fragments
    sync_target: SyncTarget
    moments_wire: str | None = None
    names: tuple[str, ...] = ()
    bound: BoundExchange = BoundExchange()
    num_params: int = 0


def _bind(engine: Engine, tree: PyTree, positions: list[int]) -> Engine:
    """The configuration for the leaves of a fragment."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    names = tuple(jax.tree_util.keystr(named[i][0]) for i in positions)
    # Those of the parameters come first.
    own = tree.params if isinstance(tree, ParamsWithMoments) else tree
    num_own = len(jax.tree.leaves(own))
    count = sum(i < num_own for i in positions)
    leaves: list[Any] = [named[i][1] for i in positions]
    # Moments are posted in the dtype of their sum.
    leaves[count:] = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype)) for x in leaves[count:]]
    bound = engine.exchange.bind(names, leaves)
    return engine._replace(bound=bound, names=names, num_params=count)


# ------------------------------------------------------------------------ The state at the start


def init_state(engine: Engine, params: PyTree) -> AveragingState:
    """The state before the first step. All nodes call it together."""
    name, num_nodes, target = f"{engine.name}: init", engine.exchange.num_nodes, engine.sync_target
    check_arrays(name, params)
    if not is_placeholder(params) and not float_leaves(params):
        raise ValueError(
            f"{engine.name}: params must have at least one floating-point leaf to average."
        )
    own, moments = params if isinstance(params, ParamsWithMoments) else (params, ())
    if not target.of_gradients:  # a gradient of a parameter that is not finite may be finite
        check_finite(name, "parameter", own, num_nodes)
        check_finite(name, "moment", moments, num_nodes)
    parts = [part_of(params, positions) for positions in cut(params, engine.fragments)]
    check_fragments(len(parts), engine.schedule)

    zero, no, yes = jnp.zeros((), jnp.int32), jnp.zeros((), bool), jnp.ones((), bool)
    uses_anchor = target.uses_anchor and engine.merge.base is None
    rounds = any(map(block_bits, (engine.wire, engine.blocking_wire)))
    fragments = []
    for part in parts:
        of_part = part.params if isinstance(part, ParamsWithMoments) else part
        fragments.append(
            FragmentState(
                posted=no,
                age=zero,
                delay=zero,
                number=zero,
                healthy=yes,
                exchange=engine.exchange.init(part),
                merge=engine.merge.init(of_part),
                feedback=init_feedback(of_part, uses_anchor) if rounds else (),
            )
        )
    schedule = engine.schedule.init()
    state = AveragingState(
        step=zero,
        exchanges=zero,
        skipped=zero,
        left_out=zero,
        merged=no,
        plan=_plan(engine, schedule, zero)[0],
        losses=jnp.zeros((2,), jnp.float32),
        schedule=schedule,
        fragments=tuple(fragments),
    )
    if not is_placeholder(params):
        # What all nodes share, such as a center, is compared at each exchange, which is an error.
        compared = None if target.of_gradients or engine.merge.shared else own
        engine.exchange.begin_run(engine.schedule.total, compared, target.of_gradients)
    # Each field needs a buffer of its own, or the state could not be donated.
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


# ---------------------------------------------------------------------------- The plan of a step


def _plan(engine: Engine, state: PyTree, step: jax.Array) -> tuple[Plan, PyTree]:
    """The plan of a step, whose fields have their dtypes, and the schedule's new state."""
    plan, state = engine.schedule.plan(state, step)
    ints = [jnp.asarray(x, jnp.int32) for x in plan[:4]]
    return Plan(*ints, *(jnp.asarray(x, bool) for x in plan[4:])), state


def guard(engine: Engine, grads: PyTree, state: AveragingState) -> jax.Array:
    """Whether all gradients are finite, in one pass over them."""
    if engine.nonfinite == "off":
        return jnp.bool_(True)
    with helpful_errors(engine.name):
        finite = engine.exchange.finite_leaves(float_leaves(grads))
    return _all_finite(engine, finite, state.step, [name for name, _ in named_floats(grads)])


def _all_finite(engine: Engine, finite, step, names=(), narrow="") -> jax.Array:
    """Whether all of ``finite`` hold. If not, it is an error if ``nonfinite`` is ``raise``.

    ``names`` are those of the leaves to which ``finite`` belongs, and ``narrow`` is what
    :func:`jdaso.core.wire.describe_narrow_wires` says.
    """

    name = engine.name  # JAX keeps what the callback refers to, which must not be the exchange

    def check(finite, step):
        if finite.all():
            return
        each = zip(names, np.atleast_1d(finite), strict=False)  # no names for a sum
        lost = [leaf or "the array" for leaf, of in each if not of]
        which = f", namely {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}" if lost else ""
        raise JdasoError(
            f"{name}: updates or parameters are not finite at step {int(step)}{which}"
            f"{narrow}, or their sum over the nodes is not. Lower the learning rate, or use "
            "nonfinite='skip' to skip the step and leave this node out of the next exchange."
        )

    if engine.nonfinite == "raise":
        # io_callback raises in a cond under vmap, so debug.callback.
        lax.cond(jnp.all(finite), lambda: None, lambda: jax.debug.callback(check, finite, step))
    return jnp.all(finite)


class _Step(NamedTuple):
    """What a fragment needs to know about a step.

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


class _Counts(NamedTuple):
    """What the fragments change together at a step, one after the other.

    Attributes:
        number: int32, the number of the next exchange.
        left_out: int32, that of the :class:`AveragingState`.
        losses: float32[2], sum and number of the losses of all nodes if a blocking exchange has
            ended, otherwise zeros.
        merged: bool, whether leaves have been merged with a mean.
    """

    number: jax.Array
    left_out: jax.Array
    losses: jax.Array
    merged: jax.Array


def move(
    engine: Engine,
    tree: PyTree,
    state: AveragingState,
    finite: jax.Array,
    value: Any = None,
    replicated: PyTree = (),
    origin: PyTree = None,
) -> tuple[PyTree, AveragingState]:
    """Merges and posts what is due, in one conditional that leaves the tree in place.

    Args:
        tree: what is exchanged, such as the parameters after the optimizer's update.
        finite: bool scalar, whether the gradients of this step were finite.
        value: the loss, or None.
        replicated: arrays that must be the same on all nodes.
        origin: the parameters, if the tree has updates in their place.

    Returns:
        The tree and the new state. If ``origin`` is given, the tree holds updates, and ``origin``
        plus the updates are the merged parameters.
    """
    target, platform = engine.sync_target, engine.exchange.platform
    leaves, treedef = jax.tree.flatten(tree)
    started = state.step >= target.schedule_lag
    plan, scheduled = _plan(engine, state.schedule, state.step - target.schedule_lag)
    plan = plan._replace(flush=plan.flush & started, epoch_end=plan.epoch_end & started)
    loss = jnp.zeros((2,), jnp.float32)  # the loss and its number, 1
    if value is not None:
        value = jnp.asarray(value, jnp.float32)
        loss = jnp.where(jnp.isfinite(value), jnp.stack([value, jnp.ones_like(value)]), 0.0)
    # If the schedule lags, this step's loss belongs to the schedule's next step.
    losses = state.losses if target.schedule_lag else state.losses + loss

    like = tree if origin is None else origin
    positions_of = float_positions(like, engine.fragments)
    fragments, active, steps = [], [], []
    for index, fragment in enumerate(state.fragments):
        fragment = fragment._replace(
            age=fragment.age + fragment.posted, healthy=fragment.healthy & finite
        )
        post = started & plan.posts(index, len(state.fragments))
        due = fragment.posted & ((fragment.age >= fragment.delay) | post | plan.flush)
        step = _Step(state.step, plan, state.schedule, replicated, losses, due, post)
        bound = _bind(engine, like, positions_of[index])
        fragments.append(fragment)
        active.append(due | post)
        if origin is None:
            steps.append(functools.partial(_step_fragment, bound, step))
        else:
            origins = jax.tree.leaves(origin)
            params = [origins[i] for i in positions_of[index][: bound.num_params]]
            steps.append(functools.partial(_step_updates, bound, step, params))

    def exchange(parts, fragments, counts):
        for i, step in enumerate(steps):
            if len(steps) > 1:  # of one fragment, the conditional around all is enough
                step = functools.partial(change_if, platform, active[i], step)
            parts[i], fragments[i], counts = step(parts[i], fragments[i], counts)
        return parts, fragments, counts

    parts = [[leaves[i] for i in positions] for positions in positions_of]
    counts = _Counts(
        state.exchanges, state.left_out, jnp.zeros((2,), jnp.float32), jnp.zeros((), bool)
    )
    with helpful_errors(engine.name):
        parts, fragments, counts = change_if(
            platform, jnp.stack(active).any(), exchange, parts, fragments, counts
        )
    for positions, part in zip(positions_of, parts, strict=True):
        for i, x in zip(positions, part, strict=True):
            leaves[i] = x

    # Sum and number of the epoch's losses over all nodes have the same bits on every node.
    observes = plan.epoch_end & ~plan.blocking & (counts.losses[1] > 0)
    mean_loss = counts.losses[0] / jnp.maximum(counts.losses[1], 1)
    observed = engine.schedule.observe(scheduled, mean_loss)
    state = AveragingState(
        step=state.step + 1,
        exchanges=counts.number,
        skipped=state.skipped + ~finite,
        left_out=counts.left_out,
        merged=counts.merged,
        plan=plan,
        losses=jnp.where(plan.epoch_end, 0.0, losses) + (loss if target.schedule_lag else 0.0),
        schedule=where_tree(observes, observed, scheduled),
        fragments=tuple(fragments),
    )
    return jax.tree.unflatten(treedef, leaves), state


# ------------------------------------------- One fragment: the order of its post and its merges

# The header of an exchange (see jdaso.core.exchange) where none has arrived: no node has
# contributed, and nothing is lost.
_NO_ARRIVAL = np.zeros(HEADER_SIZE, np.float32)
_NO_ARRIVAL[FINITE] = 1


def _step_fragment(
    engine: Engine, step: _Step, leaves: Leaves, fragment: FragmentState, counts: _Counts
) -> tuple[Leaves, FragmentState, _Counts]:
    """Merges the exchange in flight and posts the fragment, as ``step`` says.

    Where both are due, most rules send the leaves from before the merge (dasgd Eq. 2 and 7), and
    two exchanges are in flight until the older one is merged.
    """
    rule, schedule, due, post = engine.merge, engine.schedule, step.due, step.post
    change = functools.partial(change_if, engine.exchange.platform)
    before, at_once = fragment, post & (step.plan.delay == 0)
    # A message depends on the rule's state, which the merge moves. A relative rule adds what was
    # missing from parameters that it has sent: sent again before the merge, it would be added
    # twice, and the nodes would drift apart.
    merges_first = rule.message is not send_leaves or rule.relative

    def send(leaves, fragment):
        post_all = functools.partial(_post, engine, step)
        return change(post, post_all, leaves, fragment, counts.number)

    def collect(condition, leaves, fragment):
        merge_all = functools.partial(_merge, engine, step.step)
        return change(condition, merge_all, leaves, fragment, jnp.asarray(_NO_ARRIVAL))

    # A merge replaces leaves that were not finite by the mean of the others, but not those of which
    # only the post of this step finds it.
    repaired = due & (~before.healthy | ~post)
    if not schedule.may_delay:
        leaves, fragment, number = send(leaves, fragment)
        # What is due, another schedule has posted. It is lost.
        header, repaired = jnp.asarray(_NO_ARRIVAL).at[FINITE].set(~due), jnp.zeros((), bool)
    elif merges_first or not schedule.may_coincide or rule.on_post is not keep_leaves:
        # The order does not matter where both are never due at one step, and in a rule that moves
        # the leaves when they are posted instead of merging something into them.
        leaves, fragment, header = collect(due, leaves, fragment)
        if merges_first:
            fragment = fragment._replace(healthy=before.healthy | due)
        leaves, fragment, number = send(leaves, fragment)
    elif not fragment.feedback:
        # The new exchange is posted first, so that the older one can be merged into the leaves in
        # their places.
        leaves, fragment, number = send(leaves, fragment)
        kept = engine.exchange.keeps_sums
        earlier = before._replace(
            exchange=before.exchange if kept else fragment.exchange, merge=fragment.merge
        )
        leaves, earlier, header = collect(due, leaves, earlier)
        fragment = fragment._replace(
            exchange=fragment.exchange if kept else earlier.exchange, merge=earlier.merge
        )
    elif fragment.feedback.anchor:
        # A node sends differences from an anchor that the sums move, so they arrive first. They are
        # merged when the leaves have been sent, from the anchor, which is their mean.
        def arrive(fragment, *nothing):
            means: Leaves = []  # of the moments; they have no anchor

            def keep_moments(part, count, arrival, header):
                means.extend(arrival.mean[count:])
                return []

            _, header, fragment = _collect(engine, step.step, leaves, fragment, keep_moments)
            return fragment, means, header

        moments = [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in leaves[engine.num_params :]]
        fragment, moments, header = change(due, arrive, fragment, moments, jnp.asarray(_NO_ARRIVAL))
        leaves, fragment, number = send(leaves, fragment)
        # This needs no conditional: where nothing was due, what has arrived is not usable, and the
        # leaves stay as they are.
        arrival = _of_means([*fragment.feedback.anchor, *moments], header, before)
        leaves, state = _apply(engine, engine.num_params, leaves, fragment.merge, arrival, header)
        fragment = fragment._replace(merge=state)
    else:
        # The merge rule moves the anchor. Its results wait in a copy of the leaves.
        merged, fragment, header = collect(due, leaves, fragment)
        leaves, fragment, number = send(leaves, fragment)
        leaves = where_tree(due, merged, leaves)

    left_out = counts.left_out + (header[FINITE] == 0) + (post & ~fragment.healthy)
    merged, losses = counts.merged | is_usable(header), counts.losses
    fragment = fragment._replace(
        posted=(fragment.posted & ~due) | post, healthy=fragment.healthy | repaired
    )
    if schedule.may_block:
        leaves, fragment, header = collect(at_once, leaves, fragment)
        left_out = left_out + (header[FINITE] == 0)
        merged, losses = merged | is_usable(header), header[LOSSES]  # the same of all fragments
        fragment = fragment._replace(
            posted=fragment.posted & ~at_once, healthy=fragment.healthy | at_once
        )
    return leaves, fragment, _Counts(number, left_out, losses, merged)


def _step_updates(
    engine: Engine,
    step: _Step,
    params: Leaves,
    leaves: Leaves,
    fragment: FragmentState,
    counts: _Counts,
) -> tuple[Leaves, FragmentState, _Counts]:
    """:func:`_step_fragment` for updates of ``params``, followed by moments.

    The parameters after the update are computed here, in the branch of a conditional, so they cost
    nothing at the other steps.
    """
    target, count = engine.sync_target, len(params)
    updates, moments = leaves[:count], leaves[count:]
    tree = [*target.to_tree(params, updates), *moments]
    tree, fragment, counts = _step_fragment(engine, step, tree, fragment, counts)
    at_once = (step.plan.delay == 0) | (engine.merge.on_post is not keep_leaves)

    def replace(updates):
        return difference(params, updates, target.to_params(tree[:count], updates))

    # Otherwise they keep their bits.
    replaced = step.due | (step.post & at_once)
    updates = change_if(engine.exchange.platform, replaced, replace, updates)
    return [*updates, *tree[count:]], fragment, counts


# -------------------------------------------------------------------------------------- The post


def _post(
    engine: Engine, step: _Step, leaves: Leaves, fragment: FragmentState, number: jax.Array
) -> tuple[Leaves, FragmentState, Number]:
    """Posts a fragment. Returns its leaves, its state and the number of the next exchange.

    The leaves that are returned are ordered after the post, so that they may change in place.
    """
    rule, exchange, feedback = engine.merge, engine.exchange, fragment.feedback
    count = engine.num_params
    message, new_state = rule.message(leaves[:count], fragment.merge)
    message = [*message, *widened(leaves[count:])]  # in 16 bits, what is small may become 0

    # The wire is chosen by what is equal on all nodes, so that all choose the same one.
    has_anchor = bool(feedback and feedback.anchor)
    wires = [*dict.fromkeys([engine.wire, engine.blocking_wire, *[FIRST_WIRE] * has_anchor])]
    choice = jnp.where(
        step.plan.blocking, wires.index(engine.blocking_wire), wires.index(engine.wire)
    )
    if has_anchor:
        differs = jnp.array([block_bits(wire) > 0 for wire in wires])[choice]
        no_mean = differs & ~feedback.anchor_ready  # which it could differ from
        choice = jnp.where(no_mean, wires.index(FIRST_WIRE), choice)
    of_moments = (engine.moments_wire,) * (len(leaves) - count)
    of_leaves = [(*[wire] * count, *of_moments) if of_moments else wire for wire in wires]

    def contribution(wire):
        """The first number of the header, int32. A node contributes if its message is finite."""
        dtypes = wire_dtypes([x.dtype for x in message], wire)
        finite = exchange.finite_leaves([*map(finite_like_packed, message, dtypes)])
        narrow = describe_narrow_wires(dtypes)
        whole = _all_finite(engine, finite, step.step, engine.names, narrow)
        first = jnp.argmin(finite).astype(jnp.int32)
        return jnp.where(whole, fragment.healthy.astype(jnp.int32), -1 - first)

    contributes = lax.switch(choice, [functools.partial(contribution, wire) for wire in of_leaves])
    healthy = contributes > 0
    agreement = jnp.zeros((len(AGREEMENT_NAMES),), jnp.float32)
    if exchange.compares:
        shared: PyTree = ()
        if exchange.same_bits:
            # int8 and float4 send differences from anchors, and would never correct a wrong one.
            anchor = feedback.anchor if feedback else ()
            shared = (step.replicated, fragment.merge if rule.shared else (), anchor)
        agreement = agreement_numbers(step.plan, step.schedule, shared)
    header = jnp.concatenate([contributes.astype(jnp.float32)[None], step.losses, agreement])

    # With feedback, a relative rule subtracts on the device, see _collect.
    options: dict[str, Any] = {"relative": True} if rule.relative and not feedback else {}
    anchors = _anchors(engine, fragment) if feedback else []

    def start(wire, of_leaves, state, residual):
        sent = message
        if feedback:  # moments have none
            compress_on = functools.partial(compress, engine.bound, wire, rule.relative)
            run = engine.bound.per_shard(compress_on, slice(0, count))
            rounded, residual = run(header[0] > 0, message[:count], residual, anchors)
            sent = [*rounded, *message[count:]]
        call = (state, number, step.step, sent, header, of_leaves)
        return *engine.bound.post(*call, **options), residual

    starts = [functools.partial(start, *pair) for pair in zip(wires, of_leaves, strict=True)]
    residual = feedback.residual if feedback else ()
    state, following, residual = lax.switch(choice, starts, fragment.exchange, residual)
    if feedback:
        bits = jnp.array([block_bits(wire) for wire in wires], jnp.int32)[choice]
        feedback = feedback._replace(residual=residual, block_bits=bits)
    if engine.bound.in_parts:
        # ``after`` makes the leaves depend on the post, so that later moves change them in place.
        state, [leaves] = engine.bound.after(state, slice(0, len(leaves)), [leaves])
        # Without the barrier, arrays that pass through this branch unchanged would make XLA copy
        # what the merge before the post has changed in place.
        new_state, feedback = lax.optimization_barrier((new_state, feedback))
    # A node that does not contribute must not move, because the sum does not contain its move.
    moved = [
        jnp.where(healthy, new, old)
        for new, old in zip(rule.on_post(leaves[:count], new_state), leaves[:count], strict=True)
    ]
    fragment = fragment._replace(
        age=jnp.zeros((), jnp.int32),
        delay=step.plan.delay,
        number=number,
        healthy=healthy,
        exchange=state,
        merge=new_state,
        feedback=feedback,
    )
    return [*moved, *leaves[count:]], fragment, following


def _anchors(engine: Engine, fragment: FragmentState) -> Leaves:
    """The anchors of the error feedback, or those of the merge rule if it has its own."""
    if fragment.feedback.anchor or engine.merge.base is None:
        return fragment.feedback.anchor
    return engine.merge.base(fragment.merge)


# ------------------------------------------------------------------------------------- The merge

# A merge needs memory for the sums. If they arrive in parts, and each part is merged before the
# next one arrives, this is the memory of the largest part. More parts take less memory and more
# time to compile. Those that fit a cache are merged faster.
_PARTS, _LEAST_BYTES = 16, 1 << 18

#: Lists of arrays. Array j of each has the shape of leaf j of a part.
_Lists = list[Leaves]


def _merge(
    engine: Engine, step: jax.Array, leaves: Leaves, fragment: FragmentState, _: jax.Array
) -> tuple[Leaves, FragmentState, jax.Array]:
    """Waits for the sums of a posted fragment and merges them. Returns their header as well."""
    rule = engine.merge
    lists, old_rest, rebuild = split_state(rule.init, fragment.merge)
    rest = old_rest  # the new one is the same for all parts

    def merge_part(part, count, arrival, header):
        nonlocal rest
        state = rebuild([each[part] for each in lists], old_rest, part)
        merged, state = _apply(engine, count, leaves[part], state, arrival, header)
        new_lists, rest, _ = split_state(rule.init, state)
        return [merged, *new_lists]

    # XLA computes an array in the place of the old one if no other result needs the old one. It
    # cannot where leaves and state are computed from each other, as an outer optimizer does. A rule
    # that moves the leaves at the post leaves them alone here.
    in_place = not lists or rule.on_post is not keep_leaves
    results, header, fragment = _collect(
        *(engine, step, leaves, fragment, merge_part, [leaves, *lists]),
        whole=not rule.leafwise,
        in_place=in_place,
    )
    leaves, *lists = results
    return leaves, fragment._replace(merge=rebuild(lists, rest)), header


def _collect(
    engine: Engine,
    step: jax.Array,
    leaves: Leaves,
    fragment: FragmentState,
    use: Callable[[slice, int, Arrival, jax.Array], _Lists],
    old: Sequence[Leaves] = (),
    whole: bool = False,
    in_place: bool = True,
) -> tuple[_Lists, jax.Array, FragmentState]:
    """Waits for the sums of a posted fragment, and moves the anchor of its error feedback.

    Args:
        leaves: those of the fragment, like the sums.
        use: ``(part, count, arrival, header) -> lists``, what to make of the sums of a part, of
            which the first ``count`` belong to parameters, and the others to moments.
        old: lists that those of ``use`` replace.
        whole: whether ``use`` needs the sums of all leaves at once.
        in_place: whether XLA can compute the lists of ``use`` in the places of the old ones.

    Returns:
        The lists for all leaves, the header, and the fragment with new exchange and feedback.
    """
    exchange, state, feedback = engine.bound, fragment.exchange, fragment.feedback
    anchor = _anchors(engine, fragment) if feedback else []
    if feedback:
        old, in_place = [*old, feedback.residual, feedback.anchor], False
    # Where XLA cannot compute new lists in the places of the old ones, they are copied there, part
    # by part, so that only those of one part need memory of their own.
    into = None if in_place or whole else old

    sizes = np.array([x.size * x.dtype.itemsize for x in leaves])
    num_parts = int(min(_PARTS, len(leaves), sizes.sum() // _LEAST_BYTES))
    if whole or not exchange.in_parts or num_parts < 2:
        parts = [slice(0, len(leaves))]
    else:
        parts = [slice(*ends) for ends in near_equal(sizes, num_parts)]

    results: list[_Lists] = []
    for part in parts:
        count = max(0, min(engine.num_params, part.stop) - part.start)
        sent, moved = (state, fragment.number, leaves[part]), list[Leaves]()
        arrived, header, state = exchange.collect(*sent, part if exchange.in_parts else None)

        divide = division_by(jnp.maximum(header[MEMBERS], 1))
        if feedback:
            total = arrived[:count]
            mean, moved = decompress_part(exchange, feedback, total, header, part, anchor)
            if engine.merge.relative:  # of this node's own, as the others have decoded it
                posted = feedback.residual[part]
                own = [jnp.where(header[OWN] > 0, x, 0) for x in posted]
                # What the sum lost by rounding stays in the leaves of the node that has summed.
                lost = [new - old for new, old in zip(moved[0], posted, strict=True)]
                mean = [m - x + e for m, x, e in zip(mean, own, lost, strict=True)]
                moved[0] = posted
            arrival = _of_means([*mean, *map(divide, arrived[count:])], header, fragment)
        else:
            mean = [*map(divide, arrived)]
            arrival = Arrival(arrived, mean, header[MEMBERS], fragment.age, fragment.healthy)

        lists = [*use(part, count, arrival, header), *moved]
        if exchange.in_parts:
            # The next part arrives when this one is merged.
            places = None if into is None else [each[part] for each in into]
            state, lists = exchange.after(state, part, lists, places)
        results.append(lists)

    lists = [[*chain.from_iterable(of_parts)] for of_parts in zip(*results, strict=True)]
    _all_finite(engine, header[FINITE] > 0, step)
    if feedback:
        *lists, residual, anchor = lists
        feedback = feedback._replace(
            residual=residual,
            anchor=anchor,
            anchor_ready=feedback.anchor_ready | is_usable(header),
        )
    return lists, header, fragment._replace(exchange=state, feedback=feedback)


def _of_means(mean: Leaves, header: jax.Array, fragment: FragmentState) -> Arrival:
    """What arrives where means are known, and not sums."""
    members = header[MEMBERS]
    total = [members.astype(m.dtype) * m for m in mean]
    return Arrival(total, mean, members, fragment.age, fragment.healthy)


def _apply(
    engine: Engine,
    count: int,
    leaves: Leaves,
    state: PyTree,
    arrival: Arrival,
    header: jax.Array,
) -> tuple[Leaves, PyTree]:
    """The leaves and the state of the merge rule after a merge.

    The first ``count`` leaves are parameters, the others are moments. Nothing changes if the sums
    are not usable.
    """
    rule, usable = engine.merge, is_usable(header)
    wide = [x.astype(m.dtype) for x, m in zip(leaves, arrival.mean, strict=True)]
    if not rule.relative:
        # A node whose parameters are not finite continues from the mean of the others.
        pairs = zip(wide, arrival.mean, strict=True)
        wide = [jnp.where(arrival.healthy, x, m) for x, m in pairs]
    of_params = arrival._replace(total=arrival.total[:count], mean=arrival.mean[:count])
    merged, new_state = rule.merge(wide[:count], of_params, state)
    if rule.relative:
        # A node that has not contributed has nothing to correct, and gets the mean itself.
        pairs = zip(merged, of_params.mean, strict=True)
        merged = [jnp.where(header[OWN] > 0, x, m) for x, m in pairs]
    if rule.own_weight is not None:
        w, pairs = rule.own_weight(arrival), zip(wide[count:], arrival.mean[count:], strict=True)
        merged = [*merged, *(w * x + (1 - w) * m for x, m in pairs)]
    leaves = [
        jnp.where(usable, round_to(m, x.dtype), engine.sync_target.fallback(x))
        for x, m in zip(leaves, merged, strict=True)
    ]
    return leaves, where_tree(usable, new_state, state)


# --------------------------------------------------------------------------------------- The end


def finish(engine: Engine, params: PyTree, state: AveragingState) -> tuple[PyTree, AveragingState]:
    """Merges the exchanges in flight, with their actual age."""
    xs, treedef = jax.tree.flatten(params)
    fragments, left_out, merged = [], state.left_out, jnp.zeros((), bool)
    in_flight = jnp.stack([fragment.posted for fragment in state.fragments]).any()
    positions_of = float_positions(params, engine.fragments)
    for positions, fragment in zip(positions_of, state.fragments, strict=True):
        merge_all = functools.partial(_merge, _bind(engine, params, positions), state.step)
        operands = [xs[i] for i in positions], fragment, jnp.asarray(_NO_ARRIVAL)
        leaves, fragment, header = change_if(
            engine.exchange.platform, fragment.posted, merge_all, *operands
        )
        left_out, merged = left_out + (header[FINITE] == 0), merged | is_usable(header)
        fragments.append(
            fragment._replace(
                posted=jnp.zeros((), bool), healthy=fragment.healthy | fragment.posted
            )
        )
        for i, x in zip(positions, leaves, strict=True):
            xs[i] = x
    merged = jnp.where(in_flight, merged, state.merged)
    state = state._replace(fragments=tuple(fragments), left_out=left_out, merged=merged)
    return jax.tree.unflatten(treedef, xs), state
