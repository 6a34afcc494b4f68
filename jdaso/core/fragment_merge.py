"""How the sums of a fragment are merged into the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdaso.core.engine_config import EngineConfig, split_state, stop_unless_finite
from jdaso.core.error_feedback import Feedback, decompress
from jdaso.core.parts import finish_in_parts
from jdaso.core.state import FragmentState
from jdaso.core.tree import divide, where_tree
from jdaso.core.types import FINITE, Arrival, Leaves


def merge_fragment(
    config: EngineConfig, step: jax.Array, num_params: int, leaves: Leaves, fragment: FragmentState
) -> tuple[Leaves, FragmentState, jax.Array, jax.Array]:
    """Waits for the sums of a posted fragment and merges them.

    Returns the leaves, the fragment's state, whether the sums were not finite, and sum and number
    of the losses of all nodes.
    """
    merge, feedback = config.merge, fragment.feedback
    old_state, restore = split_state(merge, fragment.merge)

    def merge_part(part: slice, total: Leaves, header: jax.Array):
        members, finite = header[0], header[FINITE] > 0
        own, count = leaves[part], max(0, min(num_params, part.stop) - part.start)
        new_feedback: list[Leaves] = []
        if feedback:
            expand = config.exchange.per_shard(decompress, part)
            total, mean, *new_feedback = expand(
                total, members, feedback.quantized, feedback.residual[part], feedback.anchor[part]
            )
        else:
            mean = [divide(t, jnp.maximum(members, 1).astype(t.dtype)) for t in total]
        wide = [x.astype(t.dtype) for x, t in zip(own, total, strict=True)]
        # A node whose parameters are not finite continues from the mean of the others.
        wide = [jnp.where(fragment.sound, x, m) for x, m in zip(wide, mean, strict=True)]
        arrival = Arrival(total[:count], mean[:count], members, fragment.age, fragment.sound)
        state = old_state[part] if merge.elementwise else old_state
        merged, new_state = merge.merge(wide[:count], arrival, state)
        if merge.own_weight is not None:
            w = merge.own_weight(arrival)
            merged = [
                *merged,
                *(w * x + (1 - w) * m for x, m in zip(wide[count:], mean[count:], strict=True)),
            ]
        usable = finite & (members > 0)
        merged = [
            jnp.where(usable, m.astype(x.dtype), config.sync_target.fallback(x))
            for x, m in zip(own, merged, strict=True)
        ]
        # A sum that is not finite must not stay in the feedback.
        old_feedback = [feedback.residual[part], feedback.anchor[part]] if feedback else []
        return [
            merged,
            jax.tree.leaves(where_tree(usable, new_state, state)),
            *where_tree(finite, new_feedback, old_feedback),
        ]

    results, header, exchange_state = finish_in_parts(
        config.exchange,
        fragment.exchange,
        fragment.number,
        leaves,
        merge_part,
        whole=not merge.elementwise,
    )
    leaves, state, *lists = results
    lost = ~stop_unless_finite(config, header[FINITE] > 0, step)
    if feedback:
        ready = feedback.anchor_ready | (~lost & (header[0] > 0))
        residual, anchor = lists
        feedback = Feedback(residual, anchor, feedback.quantized, ready)
    fragment = fragment._replace(
        posted=jnp.zeros((), bool),
        sound=jnp.ones((), bool),
        exchange=exchange_state,
        merge=restore(jax.tree.unflatten(jax.tree.structure(old_state), state)),
        feedback=feedback,
    )
    return leaves, fragment, lost, header[1:3]
