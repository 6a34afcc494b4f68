"""Asynchronous EASGD and EAMSGD: an elastic force between each worker and the centre, in turn."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax

from jdaso._base import Arrival, Leaves, Merge, PyTree
from jdaso._center import Center
from jdaso._engine import Averaging, averaging
from jdaso._leaves import split, widened
from jdaso._subject import BEFORE
from jdaso.algorithms._arguments import check_positive, check_share, plain
from jdaso.algorithms._center_rules import check_center, elastic_rule
from jdaso.algorithms._eamsgd import check_nesterov, nesterov
from jdaso.schedules import constant


class SentState(NamedTuple):
    """x as it was sent, while the reply is on its way: a tree like the parameters, widened."""

    sent: PyTree


def async_easgd(
    center: Center,
    period: int,
    alpha: float | None = None,
    beta: float = 0.9,
    *,
    delay: int = 0,
    nonfinite: str = "skip",
) -> Averaging:
    """Asynchronous elastic averaging SGD: each worker meets the centre on a clock of its own.

    Before the update of every ``period``-th step of a worker, with x the parameters at which that
    step's gradient was taken, u the local optimizer's update, c the centre as it is when the
    worker's message arrives:

        x <- x + u - alpha (x - c)                                  (easgd Algorithm 1, a)
        c <- c + alpha (x - c)                                      (easgd Algorithm 1, b)

    with the old x and c on both right sides: one atomic exchange, where the paper's worker fetches
    c and then sends the force. In turns, that is Eq. 12 and 13. With a ``delay`` the force that was
    computed from the x that was sent reaches it so many steps later, so that both sides are moved
    by the same amount, always. The exchange before a worker's very first step is left out: for one
    that starts from the centre as it is, it would do nothing.

    Args:
        center: where workers meet, :func:`jdaso.mpi_center` or :func:`jdaso.simulated_center`.
        period: tau, a worker's optimizer steps between two exchanges.
        alpha: moving rate, in (0, 1); None: ``beta / (p period)`` (footnote 8), p workers. In
            turns, for ``F = x^2/2``, it is stable up to ``(4 - 2 eta) / (4 - eta)`` (Sec. 4).
        beta: used where alpha is None.
        delay: a worker's steps between sending and the force, ``0 <= delay <= period``; 0 waits.
            Any other needs a widened copy of the parameters.
        nonfinite: ``skip``: a worker with numbers that are not finite sends nothing and starts
            again from the centre; ``raise`` stops it.

    Returns:
        An optax transformation, to be the last of a chain. ``update`` needs ``params``; one
        starts from ``center.join(params)``. What one evaluates and saves is the centre.

    Raises:
        ValueError: for an alpha outside (0, 1), a beta that is not positive, a period below 1, a
            delay outside [0, period].

    References:
        Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD, NeurIPS 2015.

    >>> import jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.async_easgd(jdaso.simulated_center(4), period=16))
    """
    return _elastic("async_easgd", center, period, alpha, beta, delay, nonfinite)


def async_eamsgd(
    center: Center,
    period: int,
    learning_rate: optax.ScalarOrSchedule,
    momentum: float,
    alpha: float | None = None,
    beta: float = 0.9,
    *,
    delay: int = 0,
    nonfinite: str = "skip",
) -> Averaging:
    """:func:`async_easgd` with Nesterov's momentum (easgd Algorithm 2).

    With delta the momentum, eta the learning rate:

        v <- delta v - eta g(x + delta v)
        x <- x + v - alpha (x - c)

    As in :func:`jdaso.eamsgd`, the params that are trained are the look-ahead point
    ``y = x + delta v``; what is sent, and pulled, is ``x = y - delta v``.

    Args:
        center, period, alpha, beta, delay, nonfinite: as in :func:`async_easgd`.
        learning_rate: eta, a number or an optax schedule.
        momentum: delta, in [0, 1).

    Returns:
        An optax transformation, a whole optimizer. ``jdaso.eamsgd_eval_params(opt_state, params)``
        is the worker's own x.

    Raises:
        ValueError: as :func:`async_easgd`, for a momentum outside [0, 1), and for a learning rate
            that is a number and not positive.

    >>> import jdaso
    >>> tx = jdaso.async_eamsgd(jdaso.simulated_center(4), 16, learning_rate=0.1, momentum=0.9)
    """
    check_nesterov("async_eamsgd", learning_rate, momentum)
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    inner = _elastic("async_eamsgd", center, period, alpha, beta, delay, nonfinite)
    return nesterov("async_eamsgd", inner, learning_rate, momentum)


def _elastic(
    name: str,
    center: Center,
    period: int,
    alpha: float | None,
    beta: float,
    delay: int,
    nonfinite: str,
) -> Averaging:
    check_center(name, center)
    schedule = constant(period, delay)
    check_positive("beta", beta)
    if alpha is None:
        alpha = beta / (center.num_workers * period)
    check_positive("alpha", alpha)
    check_share("alpha", alpha, below_one=True)
    alpha = plain("alpha", alpha)
    exchange = center.serve(elastic_rule(alpha))
    merge = _elastic_merge(alpha, late=delay > 0)
    return averaging(name, exchange, schedule, merge, nonfinite=nonfinite, subject=BEFORE)


def _elastic_merge(alpha: float, late: bool) -> Merge:
    """Algorithm 1, a), where the reply arrives; the centre is the reply."""

    def init(params: PyTree) -> PyTree:
        return SentState(widened(params)) if late else ()

    def message(leaves: Leaves, state: PyTree):
        wide = widened(leaves)
        return wide, SentState(split(state.sent)[1](wide)) if late else ()

    def merge(leaves: Leaves, arrival: Arrival, state: PyTree):
        sent = split(state.sent)[0] if late else leaves
        pulled = [
            jnp.where(arrival.sound, x - alpha * (s - c), c)
            for x, s, c in zip(leaves, sent, arrival.total, strict=True)
        ]
        return pulled, state

    return Merge(init=init, merge=merge, message=message)
