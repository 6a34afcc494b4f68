"""The numbers that one watches while training goes on."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso._base import Exchange, PyTree
from jdaso._consensus import consensus
from jdaso._leaves import float_leaves, widened
from jdaso._state import averaging_state


class Metrics(NamedTuple):
    """What an averaging did up to the last step and at it; scalars, as they lie in its state.

    Attributes:
        step: int32, optimizer steps taken.
        phase: int32, an index of :data:`jdaso.PHASES`.
        period: int32, optimizer steps between two exchanges.
        delay: int32, optimizer steps that an exchange may fly.
        in_flight: int32, exchanges in the air: at most one for each fragment.
        exchanges: int32, exchanges posted so far.
        merged: bool, whether an exchange ended at the last step.
        skipped: int32, steps of this node that were skipped: their updates were not finite, or
            parameters would not have been.
        left_out: int32, exchanges to which this node did not contribute, as it was not sound, or
            that brought nothing, as their sum was not finite.
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
    """The numbers of an averaging, found in an optimizer's state; nothing waits for them.

    Where the state is donated to the next step, call it inside the training step and return the
    result: outside, its arrays are the state's own and go with it.

    Args:
        opt_state: an optax state, however deeply chained or wrapped, with one averaging in it.

    Returns:
        Arrays on the device; ``jax.device_get`` fetches all at once, every few steps.

    Raises:
        ValueError: if there is no state of an averaging, or more than one.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.dasgd(jdaso.single_exchange(), period=4, delay=2)
    >>> state = optax.chain(optax.sgd(0.1), averaging).init({"w": jnp.ones(3)})
    >>> int(jdaso.metrics(state).period), int(jdaso.metrics(state).in_flight)
    (4, 0)
    """
    state = averaging_state(opt_state)
    posted = jnp.stack([flight.posted for flight in state.flights])
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


def drift(exchange: Exchange, params: PyTree) -> jax.Array:
    """How far this node's parameters are from the mean of all nodes'; blocks.

    ``||x_node - mean_i x_i||``, the Euclidean norm over all floating-point leaves together. All
    nodes must call it. Inside jit as well as outside.

    Args:
        exchange: how nodes reach each other.
        params: arrays, of the same shapes and dtypes on all nodes. 16-bit leaves travel as
            float32: a mean rounded to their precision would be away from equal nodes, too.

    Returns:
        A float32 scalar, another one on every node.

    >>> import jax.numpy as jnp, jdaso
    >>> float(jdaso.drift(jdaso.single_exchange(), {"w": jnp.ones(3)}))
    0.0
    """
    own = widened(float_leaves(params))
    return _distance(own, consensus(exchange, own))


@jax.jit
def _distance(a: PyTree, b: PyTree) -> jax.Array:
    return jnp.asarray(optax.tree.norm(optax.tree.sub(a, b)), jnp.float32)
