"""What is exchanged at a step: parameters after the update, parameters before it, or gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso.core.tree import difference, is_float
from jdaso.core.types import Leaves


def _updated(params: Leaves, updates: Leaves) -> Leaves:
    return [
        (p + u).astype(p.dtype) if is_float(p) else u for p, u in zip(params, updates, strict=True)
    ]


class SyncTarget(NamedTuple):
    """How to compute the exchanged leaves, and how to apply the merged ones.

    Attributes:
        to_leaves: ``(params, updates) -> leaves``, the leaves to exchange.
        to_updates: ``(params, updates, leaves) -> updates``, which apply the merged leaves.
        must_be_finite: ``(params, updates) -> leaves``. If one of them is not finite, the step is
            skipped. By default these are the updated parameters and the updates of integers.
        fallback: ``(leaf) -> leaf``, used in place of a merged leaf if no node has contributed.
        schedule_lag: steps by which the schedule's clock is behind. It is 1 if parameters are
            exchanged before the update, because they are the result of the previous step.
        needs_params: whether ``update`` requires ``params``.
        uses_anchor: whether the wire int8 sends differences to the last mean. The leaves must be
            close to their last mean.
    """

    to_leaves: Callable[[Leaves, Leaves], Leaves]
    to_updates: Callable[[Leaves, Leaves, Leaves], Leaves]
    must_be_finite: Callable[[Leaves, Leaves], Leaves] = _updated
    fallback: Callable[[jax.Array], jax.Array] = lambda leaf: leaf
    schedule_lag: int = 0
    needs_params: bool = True
    uses_anchor: bool = True


def _add_difference(params: Leaves, updates: Leaves, leaves: Leaves) -> Leaves:
    differences = difference(params, updates, leaves)
    return [jnp.add(u, d) for u, d in zip(updates, differences, strict=True)]


#: Parameters after the local optimizer's update, for DASO, DaSGD, Local SGD and DiLoCo.
AFTER_UPDATE = SyncTarget(_updated, difference)
#: Parameters before the update, at which the gradient was computed, for EASGD.
BEFORE_UPDATE = SyncTarget(lambda params, updates: params, _add_difference, schedule_lag=1)
#: Gradients, for synchronous data parallelism.
GRADIENTS = SyncTarget(
    lambda params, updates: updates,
    lambda params, updates, leaves: leaves,
    must_be_finite=lambda params, updates: updates,
    fallback=jnp.zeros_like,  # with their own gradients, the nodes would diverge
    needs_params=False,
    uses_anchor=False,
)
