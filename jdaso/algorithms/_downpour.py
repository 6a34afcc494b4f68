"""DOWNPOUR: workers add their updates to the centre and go on from it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from jdaso._base import Arrival, Leaves, Merge, PyTree
from jdaso._center import Center, Rule
from jdaso._engine import Averaging, averaging
from jdaso._leaves import split, widened
from jdaso.algorithms._arguments import check_positive, check_share
from jdaso.algorithms._center_rules import averaging_rule, check_center, summing_rule
from jdaso.schedules import constant


class BaseState(NamedTuple):
    """Where the updates began that the centre has not got yet, a tree like the parameters."""

    base: PyTree


def downpour(center: Center, period: int, *, delay: int = 0, nonfinite: str = "skip") -> Averaging:
    """DOWNPOUR: every worker adds the sum of its updates to the centre, and takes the centre.

    After every ``period``-th update of a worker, with v the sum of its updates since last time:

        c <- c + v;  x <- c;  v <- 0                                    (easgd Algorithm 3)

    There it stands before the next gradient, here after the last update: the same moment, but for
    the pull before a worker's very first step, which :meth:`jdaso.Center.join` is here. With a
    ``delay`` the centre as it was then arrives so many steps later, and ``x <- c + v`` with v
    what the worker has added since: nothing is lost. After the last step the centre lacks what a
    worker has added since its last exchange; a number of steps that ``period`` divides leaves
    nothing, with ``delay=0``.

    Args:
        center: where workers meet, :func:`jdaso.mpi_center` or :func:`jdaso.simulated_center`.
        period: tau, a worker's optimizer steps between two exchanges. The paper finds it unstable
            for 16 and more.
        delay: a worker's steps between sending and taking, ``0 <= delay <= period``; 0 waits.
        nonfinite: as in :func:`jdaso.async_easgd`.

    Returns:
        An optax transformation, to be the last of a chain. ``update`` needs ``params``; one
        starts from ``center.join(params)``. The state holds a copy of the parameters.

    Raises:
        ValueError: for a period below 1, a delay outside [0, period].

    References:
        Dean et al., Large scale distributed deep networks, NeurIPS 2012.

    >>> import jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.downpour(jdaso.simulated_center(4), period=4))
    """
    return _downpour("downpour", center, period, delay, nonfinite, summing_rule())


def adownpour(center: Center, period: int, *, delay: int = 0, nonfinite: str = "skip") -> Averaging:
    """:func:`downpour`, whose centre is averaged over time; the average is what one evaluates.

    With t the number of the centre's updates, from 0, at each of them, c still the old one:

        z <- (1 - a) z + a c,  a = 1 / (t + 1)                                (easgd Sec. 5)

    So z is the mean of all centres up to the last but one. One worker with period 1 is ASGD,
    whose average is also ``z = optax.incremental_update(x, z, 1 / (t + 1))`` before each step.

    Args:
        center, period, delay, nonfinite: as in :func:`downpour`.

    Returns:
        An optax transformation as of :func:`downpour`. z is the ``average`` of
        ``center.read(params)``.

    Raises:
        ValueError: for a period below 1, a delay outside [0, period].

    >>> import jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.adownpour(jdaso.simulated_center(4), period=4))
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
    """:func:`downpour`, whose centre has a moving average; the average is what one evaluates.

    As :func:`adownpour`, with ``a`` the constant ``moving_rate``. One worker with period 1 is
    MVASGD.

    Args:
        center, period, delay, nonfinite: as in :func:`downpour`.
        moving_rate: a, in (0, 1]; 0.001 in the paper.

    Returns:
        An optax transformation as of :func:`downpour`.

    Raises:
        ValueError: for a moving rate outside (0, 1], a period below 1, a delay outside
            [0, period].

    >>> import jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.mvadownpour(jdaso.simulated_center(4), period=4))
    """
    check_positive("moving_rate", moving_rate)
    check_share("moving_rate", moving_rate)
    return _downpour("mvadownpour", center, period, delay, nonfinite, averaging_rule(moving_rate))


def _downpour(
    name: str, center: Center, period: int, delay: int, nonfinite: str, rule: Rule
) -> Averaging:
    check_center(name, center)
    schedule = constant(period, delay)
    return averaging(name, center.serve(rule), schedule, _summing_merge(), nonfinite=nonfinite)


def _summing_merge() -> Merge:
    """The updates since last time are ``x - base``; no sum of them has to be kept."""

    def message(leaves: Leaves, state: BaseState):
        base, where = split(state.base)
        sent = [x - b for x, b in zip(widened(leaves), widened(base), strict=True)]
        return sent, BaseState(where(leaves))

    def merge(leaves: Leaves, arrival: Arrival, state: BaseState):
        base, where = split(state.base)
        moved = [
            jnp.where(arrival.sound, c + (x - b.astype(x.dtype)), c)
            for x, b, c in zip(leaves, base, arrival.total, strict=True)
        ]
        # In the parameters' own dtype, as what follows is measured from what they are rounded to.
        begun = [c.astype(b.dtype) for b, c in zip(base, arrival.total, strict=True)]
        return moved, BaseState(where(begun))

    return Merge(init=BaseState, merge=merge, message=message)
