"""What happens to one fragment when its exchange is posted, merged, or both."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jdaso.core.engine_config import EngineConfig, StepContext
from jdaso.core.fragment_merge import merge_fragment, skip_merge
from jdaso.core.fragment_post import post_fragment
from jdaso.core.state import FragmentState
from jdaso.core.tree import difference
from jdaso.core.types import Leaves, PyTree, keep_leaves


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

    The first ``num_params`` leaves are parameters, the others are optimizer moments. ``number`` is
    that of the next exchange.
    """

    def collect(leaves, fragment):
        return merge_fragment(config, context.step, num_params, leaves, fragment)

    lost = context.due & context.post  # of an exchange that another schedule has posted
    merged = jnp.zeros((), bool)
    if config.schedule.may_delay:
        leaves, fragment, late = lax.cond(context.due, collect, skip_merge, leaves, fragment)
        lost, merged = late.lost, late.merged
    leaves, fragment, number = lax.cond(
        context.post,
        lambda x, f: post_fragment(config, context, num_params, x, f, number),
        lambda x, f: (x, f, number),
        leaves,
        fragment,
    )
    unsound = context.post & ~fragment.sound
    losses = jnp.zeros((2,), jnp.float32)
    if config.schedule.may_block:
        at_once = context.post & (context.plan.delay == 0)
        leaves, fragment, now = lax.cond(at_once, collect, skip_merge, leaves, fragment)
        lost = lost.astype(jnp.int32) + now.lost
        merged, losses = merged | now.merged, now.losses
    left_out = lost.astype(jnp.int32) + unsound
    return leaves, fragment, FragmentResult(number, left_out, losses, merged)


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
