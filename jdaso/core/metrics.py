"""Counters and current schedule of an averaging."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdaso.core.state import averaging_state
from jdaso.core.types import PyTree


class Metrics(NamedTuple):
    """What an averaging did up to the last step, and at this step. All fields are scalars.

    Attributes:
        step: int32, optimizer steps taken.
        phase: int32, index of :data:`jdaso.schedules.PHASES`.
        period: int32, as in :class:`jdaso.core.Plan`.
        delay: int32, as in :class:`jdaso.core.Plan`.
        in_flight: int32, exchanges in flight, at most one for each fragment.
        exchanges: int32, exchanges posted. It is also the number of the next one.
        merged: bool, whether a mean was merged at the last step, or by :func:`jdaso.drain` after
            it. It is false if no node has contributed, or if the sum was not finite.
        skipped: int32, steps that this node skipped, because its gradients were not finite. In an
            ``optax.chain``, the updates that the averaging gets count as the gradients.
        left_out: int32, exchanges to which this node did not contribute, because its parameters
            were not finite, or that were ignored, because their sum was not finite.
    """

    step: jax.Array
    phase: jax.Array
    period: jax.Array
    delay: jax.Array
    in_flight: jax.Array
    exchanges: jax.Array
    merged: jax.Array
    skipped: jax.Array
    left_out: jax.Array


def metrics(opt_state: PyTree) -> Metrics:
    """Finds the metrics of an averaging in an optimizer's state, without waiting for them.

    If the state is donated to the next step, call this function inside the training step and
    return the result. Outside, the result shares its arrays with the state.

    Args:
        opt_state: an optax state, with any nesting of chains and wrappers.

    Returns:
        :class:`jdaso.core.Metrics`, which explains the fields: arrays on the device.
        ``jax.device_get`` fetches all of them at once.

    Raises:
        ValueError: if the state holds no averaging, or more than one.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.dasgd(jdaso.single_exchange(), period=4, delay=2)
    >>> state = jdaso.chain(optax.sgd(0.1), averaging).init({"w": jnp.ones(3)})
    >>> int(jdaso.metrics(state).period), int(jdaso.metrics(state).in_flight)
    (4, 0)
    """
    state = averaging_state(opt_state)
    posted = jnp.stack([fragment.posted for fragment in state.fragments])
    return Metrics(
        step=state.step,
        phase=state.plan.phase,
        period=state.plan.period,
        delay=state.plan.delay,
        in_flight=jnp.sum(posted, axis=0, dtype=jnp.int32),
        exchanges=state.exchanges,
        merged=state.merged,
        skipped=state.skipped,
        left_out=state.left_out,
    )
