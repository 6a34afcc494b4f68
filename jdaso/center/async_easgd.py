"""Asynchronous EASGD and EAMSGD: an elastic force between each worker and the centre."""

from typing import NamedTuple

import jax.numpy as jnp
import optax

from jdaso.algorithms.defaults import python_float
from jdaso.algorithms.eamsgd import check_nesterov, nesterov
from jdaso.center.rules import check_center, elastic_rule
from jdaso.center.types import Center
from jdaso.core.transformation import BEFORE_UPDATE, Averaging, averaging
from jdaso.core.tree import split, widened
from jdaso.core.types import Arrival, Leaves, Merge, PyTree
from jdaso.core.validation import check_positive, check_share
from jdaso.schedules import constant


class SentState(NamedTuple):
    """The x that was sent, a tree like the parameters. The merge of the reply needs it.

    Its leaves are float32, or float64 where those of the parameters are.
    """

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
    """Asynchronous elastic averaging SGD: each worker exchanges with the centre on its own clock.

    Before the update of every ``period``-th step of a worker, with x the parameters at which that
    step's gradient was taken, u the local optimizer's update, and c the centre when the worker's
    message arrives:

        x <- x + u - alpha (x - c)                                  (easgd Algorithm 1, a)
        c <- c + alpha (x - c)                                      (easgd Algorithm 1, b)

    Both right sides use the old x and c. The exchange is atomic, whereas the paper's worker fetches
    c and then sends the force. In turns, it equals Eq. 12 and 13. With a ``delay``, the worker
    applies the force ``delay`` steps after sending, computed from the x that it sent. Worker and
    centre therefore always move by the same amount. The exchange before a worker's first step is
    left out, because it does nothing for a worker that starts from the centre.

    Args:
        center: From :func:`jdaso.center.mpi_center` or :func:`jdaso.center.simulated_center`.
        period: tau, a worker's optimizer steps between two exchanges.
        alpha: Moving rate, in (0, 1), the same at every exchange. None selects ``beta / p`` with p
            workers, whatever the period; :func:`jdaso.easgd` tells how footnote 8 is to be read.
            In turns, for ``F = x^2/2``, it is stable up to ``(4 - 2 eta) / (4 - eta)`` (Sec. 4).
        beta: Used where alpha is None.
        delay: A worker's steps between sending and applying the force, ``0 <= delay <= period``.
            With 0, the worker waits for the reply. Otherwise the state holds a widened copy of the
            parameters.
        nonfinite: With ``skip``, a worker whose numbers are not finite does not contribute and
            starts again from the centre. With ``raise``, it raises an error.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``. Start
        from ``center.join(params)``. Evaluate and save the centre.

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
            that is a number and not positive.

    >>> import jdaso
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.center.async_eamsgd(center, 16, learning_rate=0.1, momentum=0.9)
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
        alpha = beta / center.num_workers
    check_positive("alpha", alpha)
    check_share("alpha", alpha, below_one=True)
    alpha = python_float("alpha", alpha)
    exchange = center.make_exchange(elastic_rule(alpha))
    merge = _elastic_merge(alpha, late=delay > 0)
    return averaging(
        name, exchange, schedule, merge, nonfinite=nonfinite, sync_target=BEFORE_UPDATE
    )


def _elastic_merge(alpha: float, late: bool) -> Merge:
    """Algorithm 1, a). The reply is the old centre."""

    def init(params: PyTree) -> PyTree:
        return SentState(widened(params)) if late else ()

    def message(leaves: Leaves, state: PyTree):
        wide = widened(leaves)
        return wide, SentState(split(state.sent)[1](wide)) if late else ()

    def merge(leaves: Leaves, arrival: Arrival, state: PyTree):
        sent = split(state.sent)[0] if late else leaves
        pulled = [
            jnp.where(arrival.healthy, x - alpha * (s - c), c)
            for x, s, c in zip(leaves, sent, arrival.total, strict=True)
        ]
        return pulled, state

    return Merge(init=init, merge=merge, message=message)
