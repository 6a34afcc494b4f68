"""What the engine's functions need to know about the algorithm and about the step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.core.exchange import BoundExchange, Exchange
from jdaso.core.fragments import Fragments
from jdaso.core.sync_target import SyncTarget
from jdaso.core.types import JdasoError, Merge, Plan, PyTree, Schedule


class EngineConfig(NamedTuple):
    """The arguments of :func:`jdaso.core.averaging`, which document the fields.

    ``moments_wire`` is that of :func:`jdaso.chain`, for what is exchanged besides parameters.
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
    names: tuple[str, ...] = ()  # of the leaves of ``bound``
    bound: BoundExchange = BoundExchange()  # the exchange of the leaves of a fragment
    moments_wire: str | None = None


class StepContext(NamedTuple):
    """What a fragment needs to know about the step.

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


def planned(config: EngineConfig, state: PyTree, step: jax.Array) -> tuple[Plan, PyTree]:
    """The plan of a step, whose fields have their dtypes, and the schedule's new state."""
    plan, state = config.schedule.plan(state, step)
    ints = [jnp.asarray(x, jnp.int32) for x in plan[:4]]
    return Plan(*ints, *(jnp.asarray(x, bool) for x in plan[4:])), state


def stop_unless_finite(
    config: EngineConfig,
    finite: jax.Array,
    step: jax.Array,
    narrow: str = "",
    names: Sequence[str] = (),
) -> jax.Array:
    """Whether all of ``finite`` hold. Raises JdasoError if not and ``nonfinite`` is ``raise``.

    ``narrow`` is what :func:`jdaso.core.wire.describe_narrow_wires` says, and ``names`` are those
    of the leaves to which ``finite`` belongs.
    """

    def stop():
        # io_callback raises in a cond under vmap, so debug.callback.
        check = functools.partial(_raise_unless_finite, config.name, narrow, tuple(names))
        jax.debug.callback(check, finite, step)

    all_finite = jnp.all(finite)
    if config.nonfinite == "raise":
        lax.cond(all_finite, lambda: None, stop)
    return all_finite


def _raise_unless_finite(name, narrow, names, finite, step):
    if not finite.all():
        each = zip(names, np.atleast_1d(finite), strict=False)  # no names for a sum
        lost = [leaf or "the array" for leaf, of in each if not of]
        which = f", namely {', '.join(lost[:4])}{', ...' * (len(lost) > 4)}" if lost else ""
        raise JdasoError(
            f"{name}: updates or parameters are not finite at step {int(step)}{which}{narrow}, or "
            "their sum over the nodes is not. Lower the learning rate, or use nonfinite='skip' to "
            "skip the step and leave this node out of the next exchange."
        )
