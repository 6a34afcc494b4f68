"""What happens to one fragment when its exchange is posted, merged, or both."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdaso.core.engine_config import EngineConfig, StepContext
from jdaso.core.fragment_merge import (
    arrive,
    merge_anchor,
    merge_fragment,
    no_arrival,
    nothing_arrives,
)
from jdaso.core.fragment_post import post_fragment
from jdaso.core.state import FragmentState
from jdaso.core.tree import difference, where_tree
from jdaso.core.types import Leaves, PyTree, keep_leaves, send_leaves


class FragmentResult(NamedTuple):
    """What the engine needs to know about the fragment.

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


def step_fragment(
    config: EngineConfig,
    context: StepContext,
    num_params: int,
    leaves: Leaves,
    fragment: FragmentState,
    number: jax.Array,
) -> tuple[Leaves, FragmentState, FragmentResult]:
    """Merges the exchange in flight and posts the fragment, as ``context`` says.

    Where both are due, the node sends its leaves from before the merge (dasgd Eq. 2 and 7), and two
    exchanges are in flight until the older one is merged.

    The first ``num_params`` leaves are parameters, the others are optimizer moments. ``number`` is
    that of the next exchange.
    """
    merge, due, post = config.merge, context.due, context.post
    at_once = post & (context.plan.delay == 0)

    def send(leaves, fragment):
        return lax.cond(
            post,
            lambda x, f: post_fragment(config, context, num_params, x, f, number),
            lambda x, f: (x, f, number),
            *(leaves, fragment),
        )

    def collect(condition, leaves, fragment):
        return lax.cond(
            condition,
            lambda x, f: merge_fragment(config, context.step, num_params, x, f),
            lambda x, f: (x, f, no_arrival()),
            *(leaves, fragment),
        )

    sound = fragment.sound
    # A merge replaces leaves that were not finite by the mean of the others.
    repaired = due & (~sound | ~post)
    if not config.schedule.may_delay:
        leaves, fragment, following = send(leaves, fragment)
        # What is due, another schedule has posted.
        arrived, repaired = no_arrival()._replace(lost=due), jnp.zeros((), bool)
    elif merge.message is not send_leaves or merge.relative:
        # What such a rule sends depends on its state, which the merge moves. A relative rule adds
        # what was missing from parameters that it has sent: sent again before the merge, it would
        # be added twice, and the nodes would drift apart.
        leaves, fragment, arrived = collect(due, leaves, fragment)
        fragment = fragment._replace(sound=sound | due)
        leaves, fragment, following = send(leaves, fragment)
    elif not config.schedule.may_coincide or merge.on_post is not keep_leaves:
        # The order does not matter where both are never due at one step, and in a rule that moves
        # the leaves when they are posted instead of merging something into them.
        leaves, fragment, arrived = collect(due, leaves, fragment)
        leaves, fragment, following = send(leaves, fragment)
    elif not fragment.feedback:
        # The new exchange is posted first, so that the older one can be merged into the leaves in
        # their place.
        before = fragment
        leaves, fragment, following = send(leaves, fragment)
        kept = config.exchange.keeps_sums
        earlier = before._replace(
            exchange=before.exchange if kept else fragment.exchange, merge=fragment.merge
        )
        leaves, earlier, arrived = collect(due, leaves, earlier)
        fragment = fragment._replace(
            exchange=fragment.exchange if kept else earlier.exchange, merge=earlier.merge
        )
    elif fragment.feedback.anchor:
        # A node sends differences from an anchor that the sums move, so they arrive first. They are
        # merged when the leaves have been sent, from the anchor, which is their mean.
        fragment, moments, arrived = lax.cond(
            due,
            lambda f: arrive(config, context.step, leaves, f),
            lambda f: nothing_arrives(leaves, f),
            fragment,
        )
        leaves, fragment, following = send(leaves, fragment)
        # Where nothing was due, what has arrived is not usable and the leaves stay as they are.
        means = [*fragment.feedback.anchor, *moments]
        leaves, state = merge_anchor(
            merge, num_params, leaves, fragment.merge, means, sound, arrived
        )
        fragment = fragment._replace(merge=state)
    else:
        # The merge rule moves the anchor. Its results wait in a copy of the leaves.
        merged, fragment, arrived = collect(due, leaves, fragment)
        leaves, fragment, following = send(leaves, fragment)
        leaves = where_tree(due, merged, leaves)
    contributes = fragment.sound
    fragment = fragment._replace(
        posted=(fragment.posted & ~due) | post, sound=fragment.sound | repaired
    )
    left_out = arrived.lost.astype(jnp.int32) + (post & ~contributes)
    losses, merged = no_arrival().losses, arrived.usable
    if config.schedule.may_block:
        leaves, fragment, now = collect(at_once, leaves, fragment)
        fragment = fragment._replace(
            posted=fragment.posted & ~at_once, sound=fragment.sound | at_once
        )
        left_out, losses, merged = left_out + now.lost, now.losses, merged | now.usable
    return leaves, fragment, FragmentResult(following, left_out, losses, merged)


def step_updates(
    config: EngineConfig,
    context: StepContext,
    params: Leaves,
    leaves: Leaves,
    fragment: FragmentState,
    number: jax.Array,
) -> tuple[Leaves, FragmentState, FragmentResult]:
    """:func:`step_fragment` for updates of ``params`` in place of parameters.

    The first leaves are the updates, the others are moments. The parameters after the update are
    computed here, in the branch of a conditional, so they cost nothing at the other steps.
    """
    target, count = config.sync_target, len(params)
    updates, moments = leaves[:count], leaves[count:]
    tree = [*target.to_tree(params, updates), *moments]
    tree, fragment, result = step_fragment(config, context, count, tree, fragment, number)
    at_once = (context.plan.delay == 0) | (config.merge.on_post is not keep_leaves)
    updates = lax.cond(
        context.due | (context.post & at_once),
        lambda: difference(params, updates, target.to_params(tree[:count], updates)),
        lambda: updates,  # they keep their bits
    )
    return [*updates, *tree[count:]], fragment, result


def skip_fragment(
    leaves: PyTree, fragment: PyTree, number: jax.Array
) -> tuple[PyTree, PyTree, FragmentResult]:
    """Changes nothing."""
    return (
        leaves,
        fragment,
        FragmentResult(
            number,
            jnp.zeros((), jnp.int32),
            jnp.zeros((2,), jnp.float32),
            jnp.zeros((), bool),
        ),
    )
