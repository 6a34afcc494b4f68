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
import optax
from jax import lax

from jdaso.core.block_format import format_of
from jdaso.core.error_feedback import FIRST_WIRE, Feedback, compress, decompress, init_feedback
from jdaso.core.exchange import (
    AGREEMENT_NAMES,
    FINITE,
    HEADER_SIZE,
    LOSSES,
    MEMBERS,
    OWN,
    Exchange,
    agreement_numbers,
)
from jdaso.core.state import AveragingState, FragmentState
from jdaso.core.tree import (
    Fragments,
    add_updates,
    check_arrays,
    check_finite,
    conditional,
    cut,
    difference,
    division_by,
    finite_leaves,
    float_leaves,
    float_positions,
    is_placeholder,
    named_floats,
    near_equal,
    num_parameters,
    part_of,
    split,
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
    keep_leaves,
    send_leaves,
)
from jdaso.core.validation import check_fragments
from jdaso.core.wire import (
    Wire,
    block_bits,
    describe_narrow_wires,
    round_to,
    sum_dtype,
    wire_dtypes,
)

# ------------------------------------------------------------------------------------------------
# The configuration


class SyncTarget(NamedTuple):
    """What is exchanged at a step, and what to make of the merged tree.

    Attributes:
        to_tree: ``(params, updates) -> tree`` to exchange, with updates of the local optimizer.
        to_params: ``(tree, updates) -> params`` after the step, from the merged tree.
        of_gradients: whether the tree is that of the gradients, before the local optimizer sees
            them. Then ``to_tree`` and ``to_params`` are not used.
        fallback: ``(leaf) -> leaf``, used in place of a merged leaf if no node has contributed.
        schedule_lag: steps by which the schedule's clock is behind. It is 1 if parameters are
            exchanged before the update, because they are the result of the previous step.
        uses_anchor: whether int8 and float4 send differences from an anchor. This requires leaves
            that stay close to their last mean.
    """

    to_tree: Callable[[PyTree, PyTree], PyTree]
    to_params: Callable[[PyTree, PyTree], PyTree]
    of_gradients: bool = False
    fallback: Callable[[jax.Array], jax.Array] = lambda leaf: leaf
    schedule_lag: int = 0
    uses_anchor: bool = True


#: Parameters after the local optimizer's update, for DASO, DaSGD, Local SGD and DiLoCo.
AFTER_UPDATE = SyncTarget(add_updates, lambda tree, updates: tree)
#: Parameters before the update, at which the gradient was computed, for EASGD.
BEFORE_UPDATE = SyncTarget(lambda params, updates: params, add_updates, schedule_lag=1)
#: Gradients, for synchronous data parallelism.
GRADIENTS = SyncTarget(
    add_updates,
    add_updates,
    of_gradients=True,
    fallback=jnp.zeros_like,  # with their own gradients, the nodes would diverge
    uses_anchor=False,
)


class Engine(NamedTuple):
    """The configuration of an averaging.

    Attributes:
        name, exchange, schedule, merge, wire, blocking_wire, nonfinite, fragments, sync_target: the
            arguments of :func:`jdaso.core.averaging`.
        moments_wire: that of :func:`jdaso.chain`.
        names: the names of the leaves of a fragment, to which ``exchange`` is then bound.
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
    num_params: int = 0


def _bind(engine: Engine, tree: PyTree, positions: list[int]) -> Engine:
    """The configuration for the leaves of a fragment."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    names = tuple(jax.tree_util.keystr(named[i][0]) for i in positions)
    count = sum(i < num_parameters(tree) for i in positions)
    leaves: list[Any] = [named[i][1] for i in positions]
    # Moments are posted in the dtype of their sum.
    leaves[count:] = [jax.ShapeDtypeStruct(x.shape, sum_dtype(x.dtype)) for x in leaves[count:]]
    exchange = engine.exchange.bound(names, leaves)
    return engine._replace(exchange=exchange, names=names, num_params=count)


# ------------------------------------------------------------------------------------------------
# The state at the start


def init_state(engine: Engine, params: PyTree) -> AveragingState:
    """The state before the first step. All nodes call it together."""
    check_arrays(f"{engine.name}: init", params)
    own, of_gradients = _params(params), engine.sync_target.of_gradients
    if not is_placeholder(params):
        if not float_leaves(params):
            raise ValueError(
                f"{engine.name}: params must have at least one floating-point leaf to average."
            )
        if not of_gradients:  # a gradient of a parameter that is not finite may be finite
            name, num_nodes = f"{engine.name}: init", engine.exchange.num_nodes
            check_finite(name, "parameter", own, num_nodes)
            if isinstance(params, ParamsWithMoments):
                check_finite(name, "moment", params.moments, num_nodes)
    parts = cut(params, engine.fragments)
    check_fragments(len(parts), engine.schedule)
    zero = jnp.zeros((), jnp.int32)
    schedule_state = engine.schedule.init()
    state = AveragingState(
        step=zero,
        exchanges=zero,
        skipped=zero,
        left_out=zero,
        merged=jnp.zeros((), bool),
        plan=_plan(engine, schedule_state, zero)[0],
        losses=jnp.zeros((2,), jnp.float32),
        schedule=schedule_state,
        fragments=tuple(_init_fragment(engine, part_of(params, positions)) for positions in parts),
    )
    if not is_placeholder(params):
        # What all nodes share, such as a center, is compared at each exchange, which is an error.
        compared = None if of_gradients or engine.merge.shared else own
        engine.exchange.begin_run(engine.schedule.total, compared, of_gradients)
    # Each field needs a buffer of its own, or the state could not be donated.
    return jax.tree.map(lambda x: jnp.array(x, copy=True), state)


def _params(tree: PyTree) -> PyTree:
    return tree.params if isinstance(tree, ParamsWithMoments) else tree


def _init_fragment(engine: Engine, tree: PyTree) -> FragmentState:
    params, zero = _params(tree), jnp.zeros((), jnp.int32)
    uses_anchor = engine.sync_target.uses_anchor and engine.merge.base is None
    rounds = any(map(block_bits, (engine.wire, engine.blocking_wire)))
    return FragmentState(
        posted=jnp.zeros((), bool),
        age=zero,
        delay=zero,
        number=zero,
        healthy=jnp.ones((), bool),
        exchange=engine.exchange.init(tree),
        merge=engine.merge.init(params),
        feedback=init_feedback(params, uses_anchor) if rounds else (),
    )


# ------------------------------------------------------------------------------------------------
# The plan of a step


def _plan(engine: Engine, state: PyTree, step: jax.Array) -> tuple[Plan, PyTree]:
    """The plan of a step, whose fields have their dtypes, and the schedule's new state."""
    plan, state = engine.schedule.plan(state, step)
    ints = [jnp.asarray(x, jnp.int32) for x in plan[:4]]
    return Plan(*ints, *(jnp.asarray(x, bool) for x in plan[4:])), state


def guard(engine: Engine, grads: PyTree, state: AveragingState) -> jax.Array:
    """Whether all gradients are finite, in one pass over them."""
    if engine.nonfinite == "off":
        return jnp.bool_(True)
    finite = engine.exchange.all_devices(finite_leaves(float_leaves(grads)))
    names = [name for name, _ in named_floats(grads)]
    return _stop_unless_finite(engine, finite, state.step, names=names)


def _stop_unless_finite(
    engine: Engine,
    finite: jax.Array,
    step: jax.Array,
    narrow: str = "",
    names: Sequence[str] = (),
) -> jax.Array:
    """Whether all of ``finite`` hold. Raises JdasoError if not and ``nonfinite`` is ``raise``.

    ``narrow`` is what :func:`jdaso.core.wire.describe_narrow_wires` says, and ``names`` are those
    of the leaves to which ``finite`` belongs.
    """

    def check(finite, step):
        if finite.all():
            return
        each = zip(names, np.atleast_1d(finite), strict=False)  # no names for a sum
        lost = [leaf or "the array" for leaf, of in each if not of]
        which = f", namely {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}" if lost else ""
        raise JdasoError(
            f"{engine.name}: updates or parameters are not finite at step {int(step)}{which}"
            f"{narrow}, or their sum over the nodes is not. Lower the learning rate, or use "
            "nonfinite='skip' to skip the step and leave this node out of the next exchange."
        )

    all_finite = jnp.all(finite)
    if engine.nonfinite == "raise":
        # io_callback raises in a cond under vmap, so debug.callback.
        lax.cond(all_finite, lambda: None, lambda: jax.debug.callback(check, finite, step))
    return all_finite


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


class _Result(NamedTuple):
    """What a step did to the fragments, or to one of them.

    Attributes:
        number: int32, the number of the next exchange.
        left_out: int32, exchanges without this node, or with a sum that is not finite.
        losses: float32[2], sum and number of the losses of all nodes if a blocking exchange has
            ended, otherwise zeros.
        merged: bool, whether the leaves have been merged with a mean.
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
    target = engine.sync_target
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

    def skip(leaves, fragment, number):
        no = jnp.zeros((), jnp.int32), jnp.zeros((2,), jnp.float32), jnp.zeros((), bool)
        return leaves, fragment, _Result(number, *no)

    def exchange(parts, fragments, number):
        *_, total = skip(parts, fragments, number)
        for i, step in enumerate(steps):
            if len(steps) > 1:  # of one fragment, the conditional around all is enough
                step = functools.partial(lax.cond, active[i], step, skip)
            parts[i], fragments[i], result = step(parts[i], fragments[i], total.number)
            total = _Result(
                result.number,
                total.left_out + result.left_out,
                result.losses if i == 0 else total.losses,  # those of all fragments are the same
                total.merged | result.merged,
            )
        return parts, fragments, total

    parts = [[leaves[i] for i in positions] for positions in positions_of]
    parts, fragments, result = conditional(
        *(engine.name, jnp.stack(active).any(), exchange, skip, parts, fragments, state.exchanges)
    )
    for positions, part in zip(positions_of, parts, strict=True):
        for i, x in zip(positions, part, strict=True):
            leaves[i] = x

    # Sum and number of the epoch's losses over all nodes have the same bits on every node.
    observes = plan.epoch_end & ~plan.blocking & (result.losses[1] > 0)
    observed = engine.schedule.observe(
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


# ------------------------------------------------------------------------------------------------
# One fragment: the order of its post and its merges

# The header of an exchange (see jdaso.core.exchange) where none has arrived: no node has
# contributed, and nothing is lost.
_NO_ARRIVAL = np.zeros(HEADER_SIZE, np.float32)
_NO_ARRIVAL[FINITE] = 1


def _is_lost(header: jax.Array) -> jax.Array:
    return ~(header[FINITE] > 0)


def _is_usable(header: jax.Array) -> jax.Array:
    return (header[FINITE] > 0) & (header[MEMBERS] > 0)


def _step_fragment(
    engine: Engine, step: _Step, leaves: Leaves, fragment: FragmentState, number: jax.Array
) -> tuple[Leaves, FragmentState, _Result]:
    """Merges the exchange in flight and posts the fragment, as ``step`` says.

    Where both are due, the node sends its leaves from before the merge (dasgd Eq. 2 and 7), and two
    exchanges are in flight until the older one is merged. ``number`` is that of the next exchange.
    """
    rule, feedback, due, post = engine.merge, fragment.feedback, step.due, step.post
    at_once = post & (step.plan.delay == 0)

    def send(leaves, fragment):
        return lax.cond(
            post,
            lambda x, f: _post(engine, step, x, f, number),
            lambda x, f: (x, f, number),
            *(leaves, fragment),
        )

    def collect(condition, leaves, fragment):
        return lax.cond(
            condition,
            lambda x, f: _merge(engine, step.step, x, f),
            lambda x, f: (x, f, _NO_ARRIVAL),
            *(leaves, fragment),
        )

    before = fragment
    # A merge replaces leaves that were not finite by the mean of the others.
    repaired = due & (~before.healthy | ~post)
    if not engine.schedule.may_delay:
        leaves, fragment, following = send(leaves, fragment)
        # What is due, another schedule has posted. It is lost.
        header = jnp.asarray(_NO_ARRIVAL).at[FINITE].set(~due)
        repaired = jnp.zeros((), bool)
    elif (
        not engine.schedule.may_coincide
        or rule.message is not send_leaves
        or rule.relative
        or rule.on_post is not keep_leaves
    ):
        # The merge comes first: the order does not matter where both are never due at one step, and
        # in a rule that moves the leaves when they are posted instead of merging something into
        # them. What a rule with a message sends depends on its state, which the merge moves. A
        # relative rule adds what was missing from parameters that it has sent: sent again before
        # the merge, it would be added twice, and the nodes would drift apart.
        leaves, fragment, header = collect(due, leaves, fragment)
        if rule.message is not send_leaves or rule.relative:
            fragment = fragment._replace(healthy=before.healthy | due)
        leaves, fragment, following = send(leaves, fragment)
    elif not feedback:
        # The new exchange is posted first, so that the older one can be merged into the leaves in
        # their places.
        leaves, fragment, following = send(leaves, fragment)
        kept = engine.exchange.keeps_sums
        earlier = before._replace(
            exchange=before.exchange if kept else fragment.exchange, merge=fragment.merge
        )
        leaves, earlier, header = collect(due, leaves, earlier)
        fragment = fragment._replace(
            exchange=fragment.exchange if kept else earlier.exchange, merge=earlier.merge
        )
    elif feedback.anchor:
        # A node sends differences from an anchor that the sums move, so they arrive first. They are
        # merged when the leaves have been sent, from the anchor, which is their mean.
        def arrive(fragment):
            moments: Leaves = []  # their means; they have no anchor

            def keep_moments(part, arrival, header):
                moments.extend(arrival.mean[_count_params(engine, part) :])
                return []

            _, header, fragment = _receive(engine, step.step, leaves, fragment, keep_moments)
            return fragment, moments, header

        def nothing_arrives(fragment):
            moments = leaves[engine.num_params :]
            return fragment, [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in moments], _NO_ARRIVAL

        fragment, moments, header = lax.cond(due, arrive, nothing_arrives, fragment)
        leaves, fragment, following = send(leaves, fragment)
        # This needs no conditional: where nothing was due, what has arrived is not usable, and the
        # leaves stay as they are.
        arrival = _of_means([*fragment.feedback.anchor, *moments], header, before)
        leaves, state = _apply(engine, engine.num_params, leaves, fragment.merge, arrival, header)
        fragment = fragment._replace(merge=state)
    else:
        # The merge rule moves the anchor. Its results wait in a copy of the leaves.
        merged, fragment, header = collect(due, leaves, fragment)
        leaves, fragment, following = send(leaves, fragment)
        leaves = where_tree(due, merged, leaves)

    contributes = fragment.healthy
    fragment = fragment._replace(
        posted=(fragment.posted & ~due) | post, healthy=fragment.healthy | repaired
    )
    left_out = _is_lost(header).astype(jnp.int32) + (post & ~contributes)
    losses, merged = jnp.zeros((2,), jnp.float32), _is_usable(header)
    if engine.schedule.may_block:
        leaves, fragment, header = collect(at_once, leaves, fragment)
        fragment = fragment._replace(
            posted=fragment.posted & ~at_once, healthy=fragment.healthy | at_once
        )
        left_out, losses = left_out + _is_lost(header), header[LOSSES]
        merged = merged | _is_usable(header)
    return leaves, fragment, _Result(following, left_out, losses, merged)


def _step_updates(
    engine: Engine,
    step: _Step,
    params: Leaves,
    leaves: Leaves,
    fragment: FragmentState,
    number: jax.Array,
) -> tuple[Leaves, FragmentState, _Result]:
    """:func:`_step_fragment` for updates of ``params``, followed by moments.

    The parameters after the update are computed here, in the branch of a conditional, so they cost
    nothing at the other steps.
    """
    target, count = engine.sync_target, len(params)
    updates, moments = leaves[:count], leaves[count:]
    tree = [*target.to_tree(params, updates), *moments]
    tree, fragment, result = _step_fragment(engine, step, tree, fragment, number)
    at_once = (step.plan.delay == 0) | (engine.merge.on_post is not keep_leaves)
    updates = lax.cond(
        step.due | (step.post & at_once),
        lambda: difference(params, updates, target.to_params(tree[:count], updates)),
        lambda: updates,  # they keep their bits
    )
    return [*updates, *tree[count:]], fragment, result


# ------------------------------------------------------------------------------------------------
# The post


def _post(
    engine: Engine, step: _Step, leaves: Leaves, fragment: FragmentState, number: jax.Array
) -> tuple[Leaves, FragmentState, jax.Array]:
    """Posts a fragment. Returns its leaves, its state and the number of the next exchange.

    The leaves that are returned are ordered after the post, so that they may change in place.
    """
    rule, exchange, count = engine.merge, engine.exchange, engine.num_params
    message, new_state = rule.message(leaves[:count], fragment.merge)
    message = [*message, *widened(leaves[count:])]  # in 16 bits, what is small may become 0

    agreement = jnp.zeros((len(AGREEMENT_NAMES),), jnp.float32)
    if exchange.compares:
        shared: PyTree = ()
        if exchange.same_bits:
            # int8 and float4 send differences from anchors, and would never correct a wrong one.
            anchor = fragment.feedback.anchor if fragment.feedback else ()
            shared = (step.replicated, fragment.merge if rule.shared else (), anchor)
        agreement = agreement_numbers(step.plan, step.schedule, shared)

    wires, choice = _wire_choice(engine, step.plan, fragment.feedback)
    of_moments = (engine.moments_wire,) * (len(leaves) - count)
    of_leaves = [(*[wire] * count, *of_moments) if of_moments else wire for wire in wires]
    check = functools.partial(_contribution, engine, step.step, message, fragment.healthy)
    contribution = lax.switch(choice, [functools.partial(check, wire) for wire in of_leaves])
    healthy = contribution > 0
    header = jnp.concatenate([contribution.astype(jnp.float32)[None], step.losses, agreement])

    sent = number, step.step, message, header
    state, following, feedback = _start(engine, fragment, sent, wires, of_leaves, choice)
    if exchange.parts is not None:
        # ``after`` makes the leaves depend on the post, so that later moves change them in place.
        state, [leaves] = exchange.parts.after(state, slice(0, len(leaves)), [leaves])
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


def _wire_choice(
    engine: Engine, plan: Plan, feedback: Feedback | tuple[()]
) -> tuple[list[str | None], jax.Array]:
    """The wires that a fragment may use, and the index of the one to use now."""
    wires = list(dict.fromkeys([engine.wire, engine.blocking_wire]))
    # The index is equal on all nodes, because it depends only on what is equal on all nodes.
    choice = jnp.where(plan.blocking, wires.index(engine.blocking_wire), wires.index(engine.wire))
    if feedback and feedback.anchor:
        wires = list(dict.fromkeys([*wires, FIRST_WIRE]))
        no_anchor = (_bits_of(wires)[choice] > 0) & ~feedback.anchor_ready
        choice = jnp.where(no_anchor, wires.index(FIRST_WIRE), choice)
    return wires, choice


def _bits_of(wires: list[str | None]) -> jax.Array:
    return jnp.array([block_bits(wire) for wire in wires], jnp.int32)


def _contribution(
    engine: Engine, step: jax.Array, message: Leaves, healthy: jax.Array, wire: Wire
) -> jax.Array:
    """The first number of the header, int32. A node contributes if its message is finite."""
    dtypes = wire_dtypes([x.dtype for x in message], wire)

    def like_on_wire(x, dtype):
        """An array that is finite if ``x`` is in its wire dtype. Rows are always finite."""
        if format_of(dtype):
            return x
        if dtype == jnp.bfloat16 and x.dtype == jnp.float32:
            # What bfloat16 cannot hold overflows in this product, which is faster than to round.
            return x * (float(jnp.finfo(x.dtype).max) / float(jnp.finfo(dtype).max))
        return round_to(x, dtype)

    leaves = [like_on_wire(x, dtype) for x, dtype in zip(message, dtypes, strict=True)]
    finite = engine.exchange.all_devices(finite_leaves(leaves))
    narrow = describe_narrow_wires(dtypes)
    whole = _stop_unless_finite(engine, finite, step, narrow, engine.names)
    return jnp.where(whole, healthy.astype(jnp.int32), -1 - jnp.argmin(finite).astype(jnp.int32))


def _start(
    engine: Engine,
    fragment: FragmentState,
    sent: tuple[jax.Array, jax.Array, Leaves, jax.Array],
    wires: list[str | None],
    of_leaves: list[Wire],
    choice: jax.Array,
) -> tuple[PyTree, Number, Feedback | tuple[()]]:
    """Hands a message to the exchange, on the chosen one of ``wires``.

    Returns the state of the exchange, the number of the next one, and the error feedback.
    """
    exchange, feedback = engine.exchange, fragment.feedback
    if not feedback:
        options = {"relative": True} if engine.merge.relative else {}

        def start(wire, state):
            return exchange.start(state, *sent, wire, **options)

        branches = [functools.partial(start, wire) for wire in of_leaves]
        return *lax.switch(choice, branches, fragment.exchange), feedback

    number, step, message, header = sent
    anchor, count = _anchors(engine, fragment), engine.num_params  # moments have no feedback

    def start_compressed(wire, of_leaves, state, residual):
        run = exchange.per_shard(functools.partial(compress, wire), slice(0, count))
        rounded, residual = run(header[0] > 0, message[:count], residual, anchor)
        rounded = [*rounded, *message[count:]]
        return *exchange.start(state, number, step, rounded, header, of_leaves), residual

    if exchange.feedback is not None and all(map(exchange.feedback.supports, of_leaves)):
        state, following, residual = exchange.feedback.start(
            fragment.exchange, *sent, of_leaves, choice, feedback.residual, anchor
        )
    else:
        each = zip(wires, of_leaves, strict=True)
        state, following, residual = lax.switch(
            choice,
            [functools.partial(start_compressed, *pair) for pair in each],
            *(fragment.exchange, feedback.residual),
        )
    bits = _bits_of(wires)[choice]
    return state, following, feedback._replace(residual=residual, block_bits=bits)


def _anchors(engine: Engine, fragment: FragmentState) -> Leaves:
    """The anchors of the error feedback, or those of the merge rule if it has its own."""
    if fragment.feedback.anchor or engine.merge.base is None:
        return fragment.feedback.anchor
    return engine.merge.base(fragment.merge)


# ------------------------------------------------------------------------------------------------
# The merge

# A merge needs memory for the sums. If they arrive in parts, and each part is merged before the
# next one arrives, this is the memory of the largest part. More parts take less memory and more
# time to compile. Those that fit a cache are merged faster.
_PARTS, _LEAST_BYTES = 16, 1 << 18

#: Lists of arrays. Array j of each has the shape of leaf j of a part.
_Lists = list[Leaves]


def _merge(
    engine: Engine,
    step: jax.Array,
    leaves: Leaves,
    fragment: FragmentState,
) -> tuple[Leaves, FragmentState, jax.Array]:
    """Waits for the sums of a posted fragment and merges them."""
    rule = engine.merge
    lists, old_rest, rebuild = _split_state(rule, fragment.merge)
    rest = old_rest  # the new one is the same for all parts

    def merge_part(part, arrival, header):
        nonlocal rest
        count = _count_params(engine, part)
        state = rebuild([each[part] for each in lists], old_rest, part)
        merged, state = _apply(engine, count, leaves[part], state, arrival, header)
        new_lists, rest, _ = _split_state(rule, state)
        return [merged, *new_lists]

    # XLA computes an array in the place of the old one if no other result needs the old one. It
    # cannot where leaves and state are computed from each other.
    in_place = not lists or rule.on_post is not keep_leaves
    results, header, fragment = _receive(
        *(engine, step, leaves, fragment, merge_part, [leaves, *lists]),
        whole=not rule.leafwise,
        in_place=in_place,
    )
    leaves, *lists = results
    return leaves, fragment._replace(merge=rebuild(lists, rest)), header


def _receive(
    engine: Engine,
    step: jax.Array,
    leaves: Leaves,
    fragment: FragmentState,
    use: Callable[[slice, Arrival, jax.Array], _Lists],
    old: Sequence[Leaves] = (),
    whole: bool = False,
    in_place: bool = True,
) -> tuple[_Lists, jax.Array, FragmentState]:
    """Waits for the sums of a posted fragment, and moves the anchor of its error feedback.

    Args:
        leaves: those of the fragment, like the sums.
        use: ``(part, arrival, header) -> lists``, what to make of the sums of a part.
        old: lists that those of ``use`` replace.
        whole: whether ``use`` needs the sums of all leaves at once.
        in_place: whether XLA can compute the lists of ``use`` in the places of the old ones.

    Returns:
        The lists for all leaves, the header, and the fragment with new exchange and feedback.
    """
    exchange, state, feedback = engine.exchange, fragment.exchange, fragment.feedback
    copied = exchange.feedback if feedback else None  # the exchange computes the error feedback
    anchor = _anchors(engine, fragment) if feedback else []
    if feedback and not copied:
        old, in_place = [*old, feedback.residual, feedback.anchor], False
    into = None if in_place or whole else old
    results: list[_Lists] = []
    copies: list[_Lists] = []  # residuals and anchors that the exchange has computed
    for part in _parts(exchange, leaves, whole):
        sent, count = (state, fragment.number, leaves[part]), _count_params(engine, part)
        if copied:
            bits_and_old = feedback.block_bits, feedback.residual[part], anchor[part]
            keep = not feedback.anchor  # the merge rule moves its own
            arrived, residual, header, state = copied.finish(*sent, part, *bits_and_old, keep)
        elif exchange.parts is None:
            arrived, header, state = exchange.finish(*sent)
        else:
            arrived, header, state = exchange.parts.finish(*sent, part)

        members, moved = header[MEMBERS], []
        divide = division_by(jnp.maximum(members, 1))
        if not feedback:
            mean = [*map(divide, arrived)]
            arrival = Arrival(arrived, mean, members, fragment.age, fragment.healthy)
        else:
            of_moments = [*map(divide, arrived[count:])]
            if copied:
                mean = arrived[:count]
                copies.append([residual, mean])
            else:
                run = exchange.per_shard(decompress, slice(part.start, part.start + count))
                old_feedback = [feedback.residual[part], feedback.anchor[part]]
                mean, residual, moved_anchor = run(
                    *(arrived[:count], members, feedback.block_bits, old_feedback[0], anchor[part])
                )
                new_feedback = [residual, moved_anchor[: len(old_feedback[1])]]
                # A sum that is not finite must not stay in the feedback.
                moved = where_tree(header[FINITE] > 0, new_feedback, old_feedback)
            arrival = _of_means([*mean, *of_moments], header, fragment)

        lists = [*use(part, arrival, header), *moved]
        if exchange.parts is not None:
            # The next part arrives when this one is merged.
            places = None if into is None else [each[part] for each in into]
            state, lists = exchange.parts.after(state, part, lists, places)
        results.append(lists)

    lists = _joined(results)
    _stop_unless_finite(engine, header[FINITE] > 0, step)
    if feedback:
        *lists, residual, anchor = [*lists, *_joined(copies)]
        feedback = feedback._replace(
            residual=residual,
            anchor=anchor[: len(feedback.anchor)],
            anchor_ready=feedback.anchor_ready | _is_usable(header),
        )
    return lists, header, fragment._replace(exchange=state, feedback=feedback)


def _parts(exchange: Exchange, leaves: Leaves, whole: bool) -> list[slice]:
    """The parts of the leaves: one, if ``whole`` or if the exchange does not copy parts."""
    sizes = np.array([x.size * x.dtype.itemsize for x in leaves])
    count = min(_PARTS, len(leaves), sizes.sum() // _LEAST_BYTES)
    if whole or exchange.parts is None or count < 2:
        return [slice(0, len(leaves))]
    return [slice(*ends) for ends in near_equal(sizes, int(count))]


def _joined(parts: list[_Lists]) -> _Lists:
    """The lists for all leaves, from those for each part."""
    return [list(chain.from_iterable(lists)) for lists in zip(*parts, strict=True)]


def _count_params(engine: Engine, part: slice) -> int:
    """How many leaves of a part are parameters, and not moments."""
    return max(0, min(engine.num_params, part.stop) - part.start)


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
    rule, usable = engine.merge, _is_usable(header)
    wide = [x.astype(m.dtype) for x, m in zip(leaves, arrival.mean, strict=True)]
    # A node whose parameters are not finite continues from the mean of the others.
    if rule.relative:  # to zeros, which it has sent in their place
        wide = [jnp.where(header[OWN] > 0, x, 0) for x in wide]
    else:
        pairs = zip(wide, arrival.mean, strict=True)
        wide = [jnp.where(arrival.healthy, x, m) for x, m in pairs]
    of_params = arrival._replace(total=arrival.total[:count], mean=arrival.mean[:count])
    merged, new_state = rule.merge(wide[:count], of_params, state)
    if rule.own_weight is not None:
        w, pairs = rule.own_weight(arrival), zip(wide[count:], arrival.mean[count:], strict=True)
        merged = [*merged, *(w * x + (1 - w) * m for x, m in pairs)]
    leaves = [
        jnp.where(usable, round_to(m, x.dtype), engine.sync_target.fallback(x))
        for x, m in zip(leaves, merged, strict=True)
    ]
    return leaves, where_tree(usable, new_state, state)


def _split_state(rule: Merge, state: PyTree) -> tuple[_Lists, Leaves, Callable[..., PyTree]]:
    """Takes the state of a merge rule apart.

    Returns:
        The floating-point leaves of each of its trees like the parameters; all other arrays, such
        as step counts; and ``(lists, rest, part) -> state``, which puts them together again. If a
        part is given, the lists hold only the leaves of this part, and :class:`optax.MaskedNode`
        takes the places of the others.
    """

    def map_state(of_tree: Callable[[PyTree], Any], of_rest: Callable[[Any], Any]) -> PyTree:
        return optax.tree_map_params(
            rule.init, of_tree, state, transform_non_params=of_rest, is_leaf=lambda _: True
        )

    trees: list[PyTree] = []
    rest: Leaves = []
    map_state(trees.append, rest.append)

    def rebuild(lists: _Lists, rest: Leaves, part: slice = slice(None)) -> PyTree:
        new_lists, new_rest = iter(lists), iter(rest)

        def fill(tree: PyTree) -> PyTree:
            floats, replace = split(tree)
            new: list[Any] = [optax.MaskedNode()] * len(floats)
            new[part] = next(new_lists)
            return replace(new)

        return map_state(fill, lambda _: next(new_rest))

    return [float_leaves(tree) for tree in trees], rest, rebuild


# ------------------------------------------------------------------------------------------------
# The end


def finish(engine: Engine, params: PyTree, state: AveragingState) -> tuple[PyTree, AveragingState]:
    """Merges the exchanges in flight, with their actual age."""
    xs, treedef = jax.tree.flatten(params)
    new_fragments, left_out, merged = [], state.left_out, jnp.zeros((), bool)
    in_flight = jnp.stack([fragment.posted for fragment in state.fragments]).any()
    positions_of = float_positions(params, engine.fragments)
    for positions, fragment in zip(positions_of, state.fragments, strict=True):
        leaves, fragment, header = lax.cond(
            fragment.posted,
            functools.partial(_merge, _bind(engine, params, positions), state.step),
            lambda x, f: (x, f, _NO_ARRIVAL),
            [xs[i] for i in positions],
            fragment,
        )
        left_out, merged = left_out + _is_lost(header), merged | _is_usable(header)
        fragment = fragment._replace(
            posted=jnp.zeros((), bool), healthy=fragment.healthy | fragment.posted
        )
        for i, x in zip(positions, leaves, strict=True):
            xs[i] = x
        new_fragments.append(fragment)
    merged = jnp.where(in_flight, merged, state.merged)
    state = state._replace(fragments=tuple(new_fragments), left_out=left_out, merged=merged)
    return jax.tree.unflatten(treedef, xs), state
