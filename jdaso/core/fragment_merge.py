"""How the sums of a fragment are merged into the parameters."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso.core.engine_config import EngineConfig, stop_unless_finite
from jdaso.core.error_feedback import Feedback, anchors, decompress
from jdaso.core.exchange import FINITE, OWN
from jdaso.core.merge_state import Dependence, SplitState, dependence, split_state
from jdaso.core.parts import Lists, finish_in_parts
from jdaso.core.state import FragmentState
from jdaso.core.tree import division_by, where_tree
from jdaso.core.types import Arrival, Leaves, Merge, PyTree
from jdaso.core.wire import round_to, sum_dtype


class Arrived(NamedTuple):
    """Scalars of an exchange whose sums have arrived.

    Attributes:
        members: float32, the number of nodes that have contributed.
        age: int32, steps since the exchange was posted.
        usable: bool, whether the sums are finite and not empty.
        lost: bool, whether the sums are not finite.
        losses: float32[2], sum and number of the losses of all nodes.
    """

    members: jax.Array
    age: jax.Array
    usable: jax.Array
    lost: jax.Array
    losses: jax.Array


def no_arrival() -> Arrived:
    """What stands for an exchange where none has arrived."""
    no = jnp.zeros((), bool)
    return Arrived(
        jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), no, no, jnp.zeros((2,), jnp.float32)
    )


def merge_fragment(
    config: EngineConfig,
    step: jax.Array,
    num_params: int,
    leaves: Leaves,
    fragment: FragmentState,
) -> tuple[Leaves, FragmentState, Arrived]:
    """Waits for the sums of a posted fragment and merges them.

    Returns:
        The leaves, the fragment with the new states of the exchange, of the merge rule and of the
        error feedback, and what has arrived.
    """
    merge, exchange, feedback = config.merge, config.bound, fragment.feedback
    state = split_state(merge.init, fragment.merge)
    reads = Dependence(leafwise=False, in_place=True)
    if exchange.in_parts:
        reads = dependence(merge, leaves[:num_params], state)
    anchor = anchors(merge, fragment.merge, feedback) if feedback else []
    posted = _Posted(config, num_params, leaves, fragment, state, anchor)
    rests: list[PyTree] = []

    def merge_part(*arrived):
        lists, rest = _merge_part(posted, *arrived)
        rests.append(rest)
        return lists

    old_feedback = [feedback.residual, feedback.anchor] if feedback else []
    in_place = not reads.leafwise or (reads.in_place and not old_feedback)
    results, header, exchange_state = finish_in_parts(
        *(exchange, fragment.exchange, leaves, functools.partial(_collect, posted), merge_part),
        whole=not reads.leafwise,
        into=None if in_place else [leaves, *state.lists, *old_feedback],
    )
    leaves, *lists = results
    lost = ~stop_unless_finite(config, header[FINITE] > 0, step)
    if feedback:
        ready = feedback.anchor_ready | (~lost & (header[0] > 0))
        *lists, residual, anchor = lists
        feedback = Feedback(residual, anchor, feedback.block_bits, ready)
    fragment = fragment._replace(
        exchange=exchange_state, merge=state.rebuild(lists, rests[-1]), feedback=feedback
    )
    usable = ~lost & (header[0] > 0)
    return leaves, fragment, Arrived(header[0], fragment.age, usable, lost, header[1:3])


def arrive(
    config: EngineConfig, step: jax.Array, leaves: Leaves, fragment: FragmentState
) -> tuple[FragmentState, Leaves, Arrived]:
    """Waits for sums that move the anchor of the error feedback, for :func:`merge_anchor`.

    Returns the fragment, the means of the moments, which have no anchor, and what has arrived.
    """
    exchange, feedback = config.bound, fragment.feedback
    state = split_state(config.merge.init, fragment.merge)
    posted = _Posted(config, 0, leaves, fragment, state, feedback.anchor)
    moments: Leaves = []

    def move(part: slice, arrived: Leaves, header: jax.Array) -> Lists:
        means, new = _means(posted, part, arrived, header[0])
        moments.extend(means[len(feedback.anchor[part]) :])
        # A sum that is not finite must not stay in the feedback.
        return where_tree(header[FINITE] > 0, new, [feedback.residual[part], feedback.anchor[part]])

    (residual, anchor), header, exchange_state = finish_in_parts(
        *(exchange, fragment.exchange, leaves, functools.partial(_collect, posted), move),
        into=[feedback.residual, feedback.anchor],
    )
    lost = ~stop_unless_finite(config, header[FINITE] > 0, step)
    usable = ~lost & (header[0] > 0)
    feedback = Feedback(residual, anchor, feedback.block_bits, feedback.anchor_ready | usable)
    arrived = Arrived(header[0], fragment.age, usable, lost, header[1:3])
    return fragment._replace(exchange=exchange_state, feedback=feedback), moments, arrived


def nothing_arrives(leaves: Leaves, fragment: FragmentState) -> tuple:
    """Stands for :func:`arrive` where nothing is due."""
    moments = leaves[len(fragment.feedback.anchor) :]
    zeros = [jnp.zeros_like(x, sum_dtype(x.dtype)) for x in moments]
    return fragment, zeros, no_arrival()


def merge_anchor(
    merge: Merge,
    num_params: int,
    leaves: Leaves,
    state: PyTree,
    mean: Leaves,
    sound: jax.Array,
    arrived: Arrived,
) -> tuple[Leaves, PyTree]:
    """Merges means, of which those of the parameters have become the anchor.

    Returns the leaves and the rule's state. ``sound`` is that of the fragment when the sums
    arrived.
    """
    members = arrived.members
    total = [members.astype(m.dtype) * m for m in mean]
    wide = [jnp.where(sound, x.astype(m.dtype), m) for x, m in zip(leaves, mean, strict=True)]
    arrival = Arrival(total, mean, members, arrived.age, sound)
    merged, new = _apply(merge, num_params, wide, arrival, state)
    leaves = [
        jnp.where(arrived.usable, round_to(m, x.dtype), x)
        for m, x in zip(merged, leaves, strict=True)
    ]
    return leaves, where_tree(arrived.usable, new, state)


class _Posted(NamedTuple):
    """A posted fragment, with the leaves into which its sums are merged."""

    config: EngineConfig
    num_params: int
    leaves: Leaves
    fragment: FragmentState
    state: SplitState  # of the merge rule
    anchor: Leaves


def _merge_part(
    posted: _Posted, part: slice, arrived: Leaves, header: jax.Array
) -> tuple[Lists, PyTree]:
    """Merges what :func:`_collect` has returned for a part.

    Returns the leaves, the lists that are like them, residual and anchor last if there is error
    feedback, and the rest of the merge rule's state, which is the same for all parts.
    """
    config, num_params, leaves, fragment, state, *_ = posted
    merge, feedback = config.merge, fragment.feedback
    members, finite = header[0], header[FINITE] > 0
    own, count = leaves[part], max(0, min(num_params, part.stop) - part.start)
    mean, new_feedback = _means(posted, part, arrived, members)
    total = [members.astype(m.dtype) * m for m in mean] if feedback else arrived
    wide = [x.astype(t.dtype) for x, t in zip(own, total, strict=True)]
    # A node whose parameters are not finite continues from the mean of the others.
    if merge.relative:
        wide = [jnp.where(header[OWN] > 0, x, 0) for x in wide]
    else:
        wide = [jnp.where(fragment.sound, x, m) for x, m in zip(wide, mean, strict=True)]
    old_lists = [each[part] for each in state.lists]
    old_state = state.rebuild(old_lists, state.rest, part)
    arrival = Arrival(total, mean, members, fragment.age, fragment.sound)
    merged, new_state = _apply(merge, count, wide, arrival, old_state)
    usable = finite & (members > 0)
    merged = [
        jnp.where(usable, round_to(m, x.dtype), config.sync_target.fallback(x))
        for x, m in zip(own, merged, strict=True)
    ]
    new = split_state(merge.init, new_state)
    lists = [merged, *where_tree(usable, new.lists, old_lists)]
    rest = where_tree(usable, new.rest, state.rest)
    if not feedback:
        return lists, rest
    # A sum that is not finite must not stay in the feedback.
    old_feedback = [feedback.residual[part], feedback.anchor[part]]
    return [*lists, *where_tree(finite, new_feedback, old_feedback)], rest


def _apply(
    merge: Merge, count: int, wide: Leaves, arrival: Arrival, state: PyTree
) -> tuple[Leaves, PyTree]:
    """Merges leaves, of which the first ``count`` are parameters and the others are moments."""
    of_params = arrival._replace(total=arrival.total[:count], mean=arrival.mean[:count])
    merged, state = merge.merge(wide[:count], of_params, state)
    if merge.own_weight is not None:
        w, moments = merge.own_weight(arrival), zip(wide[count:], arrival.mean[count:], strict=True)
        merged = [*merged, *(w * x + (1 - w) * m for x, m in moments)]
    return merged, state


def _collect(posted: _Posted, state: PyTree, part: slice) -> tuple[Leaves, jax.Array, PyTree]:
    """Waits for a part of the sums."""
    exchange, number = posted.config.bound, posted.fragment.number
    return exchange.finish(state, number, posted.leaves[part], part if exchange.in_parts else None)


def _means(
    posted: _Posted, part: slice, arrived: Leaves, members: jax.Array
) -> tuple[Leaves, Lists]:
    """The means of what :func:`_collect` has returned, and the new residual and anchor."""
    exchange, feedback = posted.config.bound, posted.fragment.feedback
    divide = division_by(jnp.maximum(members, 1))
    if not feedback:
        return [*map(divide, arrived)], []
    residual, anchor = feedback.residual[part], posted.anchor[part]
    count = len(residual)  # of the parameters; moments have none
    of_moments = [*map(divide, arrived[count:])]
    expand = exchange.per_shard(decompress, slice(part.start, part.start + count))
    means, residual, moved = expand(arrived[:count], members, feedback.block_bits, residual, anchor)
    return [*means, *of_moments], [residual, moved[: len(feedback.anchor[part])]]
