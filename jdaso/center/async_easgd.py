"""Asynchronous EASGD and EAMSGD: an elastic force between each worker and the center."""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from jdaso.algorithms.eamsgd import check_nesterov, nesterov
from jdaso.center.types import (
    Center,
    CenterState,
    ServerRule,
    check_center,
    first_state,
    python_float,
)
from jdaso.core.transformation import BEFORE_UPDATE, Averaging, averaging
from jdaso.core.tree import split, widened
from jdaso.core.types import Arrival, Leaves, Merge, PyTree
from jdaso.core.validation import check_positive, check_share
from jdaso.schedules import constant


def async_easgd(
    center: Center,
    period: int,
    alpha: float | None = None,
    beta: float = 0.9,
    *,
    delay: int = 0,
    nonfinite: str = "skip",
) -> Averaging:
    """Asynchronous elastic averaging SGD: each worker exchanges with the center on its own clock.

    Before the update of every ``period``-th step of a worker, with x the parameters at which that
    step's gradient was taken, u the local optimizer's update, and c the center when the worker's
    message arrives:

        x <- x + u - alpha (x - c)                                  (easgd Algorithm 1, a)
        c <- c + alpha (x - c)                                      (easgd Algorithm 1, b)

    Both right sides use the old x and c. The exchange is atomic, whereas the paper's worker fetches
    c and then sends the force; in turns it equals Eq. 12 and 13. There is no exchange before the
    first step, at which worker and center are equal. With a ``delay``, the worker applies the force
    of the x that it sent, so worker and center always move by the same amount.

    Args:
        center: From :func:`mpi_center` or :func:`simulated_center`.
        period: tau, a worker's optimizer steps between two exchanges.
        alpha: Moving rate, in (0, 1). None selects ``beta / p`` with p workers, whatever the
            period, for the reason that :func:`jdaso.easgd` gives. In turns, for ``F = x^2/2``, it
            is stable up to ``(4 - 2 eta) / (4 - eta)`` (Sec. 4).
        beta: Used where alpha is None.
        delay: A worker's steps between sending and applying the force, ``0 <= delay <= period``.
            With 0, the worker waits. Otherwise the state holds a widened copy of the parameters.
        nonfinite: With ``skip``, a worker whose numbers are not finite does not contribute and
            starts again from the center. With ``raise``, it raises an error.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``. Start
        from ``center.join(params)``. Evaluate and save the center.

    Raises:
        ValueError: for an alpha outside (0, 1), a beta that is not positive, a period below 1, or
            a delay outside [0, period].

    References:
        Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD, NeurIPS 2015.

    >>> import jdaso, optax
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.center.async_easgd(center, period=16))
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
    """:func:`async_easgd` with Nesterov momentum (easgd Algorithm 2).

    With delta the momentum and eta the learning rate:

        v <- delta v - eta g(x + delta v)
        x <- x + v - alpha (x - c)

    As in :func:`jdaso.eamsgd`, the trained params are the look-ahead point ``y = x + delta v``.
    The worker sends ``x = y - delta v``, and the force acts on x.

    Args:
        center, period, alpha, beta, delay, nonfinite: As in :func:`async_easgd`.
        learning_rate: eta, a number or an optax schedule.
        momentum: delta, in [0, 1).

    Returns:
        An optax transformation, a complete optimizer. ``jdaso.eamsgd_eval_params(opt_state,
        params)`` is the worker's x.

    Raises:
        ValueError: as :func:`async_easgd`, for a momentum outside [0, 1), or for a learning rate
            that is not positive.

    >>> import jdaso
    >>> tx = jdaso.center.async_eamsgd(jdaso.center.simulated_center(4), 16, 0.1, momentum=0.9)
    """
    check_nesterov("async_eamsgd", learning_rate, momentum)
    if not callable(learning_rate):
        check_positive("learning_rate", learning_rate)
    inner = _elastic("async_eamsgd", center, period, alpha, beta, delay, nonfinite)
    return nesterov("async_eamsgd", inner, learning_rate, momentum)


def elastic_rule(alpha: float) -> ServerRule:
    """A worker sends x. ``c <- c + alpha (x - c)``, and the reply is the old c."""

    def update(state: CenterState, message: Leaves):
        center = [c + alpha * (x - c) for c, x in zip(state.center, message, strict=True)]
        return state._replace(center=center, clock=state.clock + 1), state.center

    return ServerRule(f"elastic, alpha={alpha}", first_state, update)


class SentState(NamedTuple):
    """The x that was sent, which the merge of the reply needs: the parameters, widened."""

    sent: PyTree


def _elastic(name, center, period, alpha, beta, delay, nonfinite) -> Averaging:
    check_center(name, center)
    schedule = constant(period, delay)
    check_positive("beta", beta)
    if alpha is None:
        alpha = beta / center.num_workers
    check_positive("alpha", alpha)
    check_share("alpha", alpha, below_one=True)
    alpha = python_float("alpha", alpha)
    late = delay > 0

    def init(params: PyTree) -> PyTree:
        return SentState(widened(params)) if late else ()

    def message(leaves: Leaves, state: PyTree):
        wide = widened(leaves)
        return wide, SentState(split(state.sent)[1](wide)) if late else ()

    def merge(leaves: Leaves, arrival: Arrival, state: PyTree):
        sent = split(state.sent)[0] if late else leaves
        pulled = [
            jnp.where(arrival.healthy, x - alpha * (s - c), c)  # the reply is the old center
            for x, s, c in zip(leaves, sent, arrival.total, strict=True)
        ]
        return pulled, state

    exchange, rule = center.make_exchange(elastic_rule(alpha)), Merge(init, merge, message=message)
    return averaging(name, exchange, schedule, rule, nonfinite=nonfinite, sync_target=BEFORE_UPDATE)
