"""What of a training step is exchanged: parameters after its update, before it, or gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso._base import Leaves
from jdaso._leaves import difference, is_float


def _moved(params: Leaves, updates: Leaves) -> Leaves:
    return [(p + u).astype(p.dtype) for p, u in zip(params, updates, strict=True)]


def landing(params: Leaves, updates: Leaves) -> Leaves:
    """Parameters after an update; of integers, the updates."""
    return [
        (p + u).astype(p.dtype) if is_float(p) else u for p, u in zip(params, updates, strict=True)
    ]


class Subject(NamedTuple):
    """How the exchanged leaves come out of a step, and how what has become of them goes back.

    Attributes:
        take: ``(params, updates) -> leaves``.
        put: ``(params, updates, leaves) -> updates``.
        lands: ``(params, updates) -> leaves``, what has to be finite for a step to be taken.
        kept: ``(leaf) -> leaf``, what a node goes on with where an exchange brings nothing.
        lag: by how many steps the schedule's clock is behind: what is exchanged after the update
            of step t is what is there before that of step t + 1.
        needs_params: whether update has to be given them.
        anchored: whether the leaves are near their last mean, so that differences to it are small.
    """

    take: Callable[[Leaves, Leaves], Leaves]
    put: Callable[[Leaves, Leaves, Leaves], Leaves]
    lands: Callable[[Leaves, Leaves], Leaves] = landing
    kept: Callable[[jax.Array], jax.Array] = lambda leaf: leaf
    lag: int = 0
    needs_params: bool = True
    anchored: bool = True


def _added(params: Leaves, updates: Leaves, leaves: Leaves) -> Leaves:
    pulls = difference(params, updates, leaves)
    return [jnp.add(u, pull) for u, pull in zip(updates, pulls, strict=True)]


#: Parameters after the local optimizer's update; DASO, DaSGD, Local SGD, DiLoCo.
AFTER = Subject(_moved, difference)
#: Parameters before it, at which its gradient was taken; EASGD.
BEFORE = Subject(lambda params, updates: params, _added, lag=1)
#: Gradients; the synchronous baselines.
GRADIENTS = Subject(
    lambda params, updates: updates,
    lambda params, updates, leaves: leaves,
    lands=lambda params, updates: updates,
    kept=jnp.zeros_like,  # or each node would follow its own
    needs_params=False,
    anchored=False,
)
