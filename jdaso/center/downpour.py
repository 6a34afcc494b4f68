"""DOWNPOUR: workers add their updates to the centre and continue from it."""

from typing import NamedTuple

import jax.numpy as jnp

from jdaso.center.rules import averaging_rule, check_center, summing_rule
from jdaso.center.types import Center, ServerRule
from jdaso.core.transformation import Averaging, averaging
from jdaso.core.tree import split, widened
from jdaso.core.types import Arrival, Leaves, Merge, PyTree
from jdaso.core.validation import check_positive, check_share
from jdaso.core.wire import round_to
from jdaso.schedules import constant


class BaseState(NamedTuple):
    """The parameters before the updates that the centre lacks, a tree like the parameters."""

    base: PyTree


def downpour(center: Center, period: int, *, delay: int = 0, nonfinite: str = "skip") -> Averaging:
    """DOWNPOUR: every worker adds the sum of its updates to the centre and adopts the centre.

    After every ``period``-th update of a worker, with v the sum of its last ``period`` updates:

        c <- c + v;  x <- c;  v <- 0                                    (easgd Algorithm 3)

    The paper exchanges before the next gradient, which is equivalent. Its pull before a worker's
    first step is :attr:`jdaso.center.Center.join`. With a ``delay``, the worker adopts the reply
    ``delay`` steps later, as ``x <- c + v`` with v the updates since sending, so no update is lost.
    At the end, the centre lacks a worker's updates since its last exchange. There are none if
    ``period`` divides the number of steps and ``delay=0``.

    Args:
        center: From :func:`jdaso.center.mpi_center` or :func:`jdaso.center.simulated_center`.
        period: tau, a worker's optimizer steps between two exchanges. The paper finds DOWNPOUR
            unstable for 16 and more.
        delay: A worker's steps between sending and adopting, ``0 <= delay <= period``. With 0, the
            worker waits for the reply.
        nonfinite: As in :func:`jdaso.center.async_easgd`.

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
    """:func:`downpour` with an average of the centre over time, which is evaluated.

    At each update of the centre, with t the number of updates before it and c the old centre:

        z <- (1 - a) z + a c,  a = 1 / (t + 1)                                (easgd Sec. 5)

    So z is the mean of all centres but the last. One worker with period 1 is ASGD, whose average
    is also ``z = optax.incremental_update(x, z, 1 / (t + 1))`` before each step.

    Args:
        center, period, delay, nonfinite: As in :func:`downpour`.

    Returns:
        An optax transformation like that of :func:`downpour`. z is ``center.read(params).average``.

    Raises:
        ValueError: for a period below 1 or a delay outside [0, period].

    >>> import jdaso, optax
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.center.adownpour(center, period=4))
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
    """:func:`downpour` with a moving average of the centre, which is evaluated.

    The average is that of :func:`adownpour` with the constant ``a = moving_rate``. With one worker
    and period 1, this is MVASGD.

    Args:
        center, period, delay, nonfinite: As in :func:`downpour`.
        moving_rate: a, in (0, 1]; 0.001 in the paper.

    Returns:
        An optax transformation like that of :func:`adownpour`.

    Raises:
        ValueError: for a moving rate outside (0, 1], a period below 1, or a delay outside
            [0, period].

    >>> import jdaso, optax
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.center.mvadownpour(center, period=4))
    """
    check_positive("moving_rate", moving_rate)
    check_share("moving_rate", moving_rate)
    return _downpour("mvadownpour", center, period, delay, nonfinite, averaging_rule(moving_rate))


def _downpour(
    name: str, center: Center, period: int, delay: int, nonfinite: str, rule: ServerRule
) -> Averaging:
    check_center(name, center)
    schedule = constant(period, delay)
    return averaging(
        name, center.make_exchange(rule), schedule, _summing_merge(), nonfinite=nonfinite
    )


def _summing_merge() -> Merge:
    """Sends x - base, the worker's updates since its last exchange.

    The merge sets x to the centre plus the updates made since sending.
    """

    def message(leaves: Leaves, state: BaseState):
        base, where = split(state.base)
        sent = [x - b for x, b in zip(widened(leaves), widened(base), strict=True)]
        return sent, BaseState(where(leaves))

    def merge(leaves: Leaves, arrival: Arrival, state: BaseState):
        base, where = split(state.base)
        moved = [
            jnp.where(arrival.healthy, c + (x - b.astype(x.dtype)), c)
            for x, b, c in zip(leaves, base, arrival.total, strict=True)
        ]
        # In the dtype of the parameters, because later updates start from rounded parameters.
        base = [round_to(c, b.dtype) for b, c in zip(base, arrival.total, strict=True)]
        return moved, BaseState(where(base))

    return Merge(init=BaseState, merge=merge, message=message)
