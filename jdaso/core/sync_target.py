"""What is exchanged at a step: parameters after the update, parameters before it, or gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso.core.tree import add_updates
from jdaso.core.types import PyTree


class SyncTarget(NamedTuple):
    """How to compute the exchanged tree, and what to make of the merged one.

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
