"""DOWNPOUR and its relatives: the center moves by the sum of what the workers send.

The functions that end in ``_rule`` are the server's updates, on NumPy or JAX arrays.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from jdaso.center.types import (
    Center,
    CenterState,
    ServerRule,
    check_center,
    first_state,
    python_float,
)
from jdaso.core.chain import chain
from jdaso.core.transformation import Averaging, averaging
from jdaso.core.tree import split, widened
from jdaso.core.types import Arrival, Leaves, Merge, PyTree, SyncTarget
from jdaso.core.validation import check_positive, check_share
from jdaso.core.wire import round_to
from jdaso.schedules import constant


def downpour(center: Center, period: int, *, delay: int = 0, nonfinite: str = "skip") -> Averaging:
    """DOWNPOUR: every worker adds the sum of its updates to the center and adopts the center.

    After every ``period``-th update of a worker, with v the sum of its last ``period`` updates:

        c <- c + v;  x <- c;  v <- 0                                    (easgd Algorithm 3)

    The paper exchanges before the next gradient, which is equivalent. Its pull before a worker's
    first step is ``center.join``. With a ``delay``, the worker adopts the reply as ``x <- c + v``
    with v its updates since sending. At the end, the center lacks what a worker did since its last
    exchange.

    Args:
        center: From :func:`mpi_center` or :func:`simulated_center`.
        period: tau, a worker's optimizer steps between two exchanges. The paper finds DOWNPOUR
            unstable for 16 and more.
        delay: A worker's steps between sending and adopting, ``0 <= delay <= period``.
        nonfinite: As in :func:`async_easgd`.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``. Start
        from ``center.join(params)``. The state holds a copy of the parameters.

    Raises:
        ValueError: for a period below 1 or a delay outside [0, period].

    References:
        Dean et al., Large scale distributed deep networks, NeurIPS 2012.

    >>> import jdaso, optax
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.center.downpour(center, period=4))
    """
    return _downpour("downpour", center, period, delay, nonfinite, summing_rule())


def adownpour(center: Center, period: int, *, delay: int = 0, nonfinite: str = "skip") -> Averaging:
    """:func:`downpour` with an average of the center over time, which is evaluated.

    At each update of the center, with t the number of updates before it and c the old center:

        z <- (1 - a) z + a c,  a = 1 / (t + 1)                                (easgd Sec. 5)

    So z is the mean of all centers but the last. One worker with period 1 is ASGD, whose average
    is also ``z = optax.incremental_update(x, z, 1 / (t + 1))`` before each step.

    Arguments and errors are those of :func:`downpour`, and so is the returned transformation. z is
    ``center.read(params).average``.

    >>> import jdaso
    >>> averaging = jdaso.center.adownpour(jdaso.center.simulated_center(4), period=4)
    """
    return _downpour("adownpour", center, period, delay, nonfinite, averaging_rule())


def mvadownpour(
    center: Center,
    period: int,
    moving_rate: float = 0.001,
    *,
    delay: int = 0,
    nonfinite: str = "skip",
) -> Averaging:
    """:func:`downpour` with a moving average of the center, which is evaluated.

    This is :func:`adownpour` with the constant ``a = moving_rate``, which must be in (0, 1] and is
    0.001 in the paper. With one worker and period 1, it is MVASGD.

    >>> import jdaso
    >>> averaging = jdaso.center.mvadownpour(jdaso.center.simulated_center(4), period=4)
    """
    check_positive("moving_rate", moving_rate)
    check_share("moving_rate", moving_rate)
    return _downpour("mvadownpour", center, period, delay, nonfinite, averaging_rule(moving_rate))


def summing_rule() -> ServerRule:
    """A worker sends v. ``c <- c + v``, and the reply is the new c (easgd Algorithm 3)."""

    def update(state: CenterState, message: Leaves):
        center = [c + v for c, v in zip(state.center, message, strict=True)]
        return state._replace(center=center, clock=state.clock + 1), center

    return ServerRule("summing", first_state, update)


def averaging_rule(moving_rate: float | None = None) -> ServerRule:
    """:func:`summing_rule` with an average z of the old centers, which starts as the first."""
    inner = summing_rule()

    def init(leaves: Leaves) -> CenterState:
        return first_state(leaves)._replace(average=[1 * x for x in leaves])

    def update(state: CenterState, message: Leaves):
        a = 1 / (state.clock + 1) if moving_rate is None else np.float64(moving_rate)
        z = [
            (1 - a).astype(z.dtype) * z + a.astype(z.dtype) * c
            for z, c in zip(state.average, state.center, strict=True)
        ]
        state, reply = inner.update(state, message)
        return state._replace(average=z), reply

    return ServerRule(f"averaging, moving_rate={moving_rate}", init, update)


class BaseState(NamedTuple):
    """The parameters before the updates that the center lacks."""

    base: PyTree


def _downpour(name, center, period, delay, nonfinite, rule: ServerRule) -> Averaging:
    check_center(name, center)
    schedule = constant(period, delay)

    def message(leaves: Leaves, state: BaseState):
        base, where = split(state.base)
        sent = [x - b for x, b in zip(widened(leaves), widened(base), strict=True)]
        return sent, BaseState(where(leaves))

    def merge(leaves: Leaves, arrival: Arrival, state: BaseState):
        base, where = split(state.base)
        moved = [  # the center and the updates made since sending
            jnp.where(arrival.healthy, c + (x - b.astype(x.dtype)), c)
            for x, b, c in zip(leaves, base, arrival.total, strict=True)
        ]
        # In the dtype of the parameters, because later updates start from rounded parameters.
        base = [round_to(c, b.dtype) for b, c in zip(base, arrival.total, strict=True)]
        return moved, BaseState(where(base))

    rules = Merge(init=BaseState, merge=merge, message=message)
    return averaging(name, center.make_exchange(rule), schedule, rules, nonfinite=nonfinite)


def mdownpour(
    center: Center, learning_rate: float, momentum: float, *, nonfinite: str = "skip"
) -> Averaging:
    """Momentum DOWNPOUR: workers send gradients, and only the server updates the parameters.

    At every step of a worker, with g its gradient:

        v <- delta v - eta g;  c <- c + delta v;  x <- c              (easgd Algorithms 4, 5)

    These are the equations as printed, so ``momentum=0`` would not move the center.

    Args:
        center: From :func:`mpi_center` or :func:`simulated_center`.
        learning_rate: eta. The paper's are 100 times smaller than for DOWNPOUR, with delta = 0.99.
        momentum: delta, in (0, 1).
        nonfinite: With ``skip``, a worker does not contribute gradients that are not finite. With
            ``raise``, it raises an error.

    Returns:
        An optax transformation, a complete optimizer. Start from ``center.join(params)``.

    Raises:
        ValueError: for a learning rate or a momentum out of range.

    >>> import jdaso
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.center.mdownpour(center, learning_rate=0.01, momentum=0.9)
    """
    check_center("mdownpour", center)
    check_positive("learning_rate", learning_rate)
    check_positive("momentum", momentum)
    check_share("momentum", momentum, below_one=True)
    rate, delta = python_float("learning_rate", learning_rate), python_float("momentum", momentum)
    adopt_center = Merge(
        init=lambda params: (),
        merge=lambda leaves, arrival, state: (arrival.total, state),
        message=lambda leaves, state: (widened(leaves), state),
    )
    # Gradients are sent, and parameters are received.
    sync_target = SyncTarget(
        lambda params, updates: updates,
        lambda tree, updates: tree,
        fallback=lambda leaf: jnp.full_like(leaf, jnp.nan),  # a gradient cannot replace the reply
        uses_anchor=False,
    )
    steps = averaging(
        "mdownpour",
        center.make_exchange(momentum_rule(rate, delta)),
        constant(period=1, delay=0),
        adopt_center,
        nonfinite=nonfinite,
        sync_target=sync_target,
    )
    return chain(optax.identity(), steps)


def momentum_rule(learning_rate: float, momentum: float) -> ServerRule:
    """A worker sends g. ``v <- delta v - eta g``, ``c <- c + delta v``. The reply is the new c."""

    def init(leaves: Leaves) -> CenterState:
        return first_state(leaves)._replace(velocity=[0 * x for x in leaves])

    def update(state: CenterState, message: Leaves):
        velocity = [
            momentum * v - learning_rate * g for v, g in zip(state.velocity, message, strict=True)
        ]
        center = [c + momentum * v for c, v in zip(state.center, velocity, strict=True)]
        return state._replace(center=center, velocity=velocity, clock=state.clock + 1), center

    return ServerRule(f"momentum, learning_rate={learning_rate}, momentum={momentum}", init, update)
