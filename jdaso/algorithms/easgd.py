"""EASGD: an elastic force pulls the nodes toward a common center."""

import warnings
from typing import NamedTuple

from jdaso.algorithms.defaults import averaging_on_one_wire, resolve_schedule
from jdaso.core.exchange import Exchange
from jdaso.core.state import averaging_state
from jdaso.core.transformation import BEFORE_UPDATE, Averaging
from jdaso.core.tree import split, widened
from jdaso.core.types import Arrival, Leaves, Merge, PyTree, Schedule
from jdaso.core.validation import check_positive, is_concrete
from jdaso.core.wire import round_to


class ElasticState(NamedTuple):
    """The center, a tree like the parameters, float32 (float64 for float64 leaves)."""

    center: PyTree


def easgd(
    exchange: Exchange,
    period: int | None = None,
    alpha: float | None = None,
    beta: float = 0.9,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    nonfinite: str = "skip",
) -> Averaging:
    """Synchronous elastic averaging SGD.

    Before the update of every ``period``-th step, with x the parameters at which that step's
    gradient was taken, c the center, u the local optimizer's update, and P nodes:

        x <- x + u - alpha (x - c)                                         (easgd Eq. 5)
        c <- c + alpha sum_i (x_i - c)                                     (easgd Eq. 6)

    Both right sides use the old x and c. The new center is not needed before the next exchange,
    so an exchange may be in flight for a whole period. The arithmetic stays that of the blocking
    algorithm, and nothing is stale.

    The paper gives beta = 0.9, and in footnote 8 "the 'effective beta' is beta / tau = p alpha".
    This can be read in two ways. As the formula of alpha it gives ``alpha = beta / (P tau)`` at an
    exchange. As the rate per step that results if ``alpha = beta / P`` acts once in tau steps, it
    leaves alpha independent of the period. The authors' launch script does the latter (``mva =
    0.9/6`` with a period of 100, "this is beta/p when p=6"), and only this agrees with their
    finding that EASGD converges alike for periods from 1 to 1000 (Sec. 9.6). So it is the default.

    Use it to hide exchanges without staleness, and where nodes should explore different
    parameters. Evaluate and save the center, ``easgd_center(opt_state)``.

    Args:
        exchange: The connection between nodes.
        period: tau, optimizer steps between two exchanges.
        alpha: Moving rate, the same at every exchange. None selects ``beta / P``, whatever the
            period.
        beta: Used where alpha is None. At every exchange the center moves toward the mean of
            the nodes by the share ``beta = P alpha``.
        schedule: Replaces the period. As long as all nodes are finite, its delay changes when
            training waits for the sum, and no result. An exchange due at the end of a step, also
            at the end of an epoch, precedes the update of the next step.
        wire, nonfinite: As in :func:`jdaso.daso`.

    Returns:
        An optax transformation. Put it last in a chain. ``update`` requires ``params``. The
        center starts as the ``params`` given to ``init``, which must be the same on all nodes. An
        MPI exchange raises an error if centers differ.

    Raises:
        ValueError: for an alpha or a beta that is not positive, a period below 1, or an unknown
            wire.

    Warns:
        UserWarning: if the center diverges for every learning rate (easgd Condition 17).

    References:
        Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD, NeurIPS 2015.

    >>> import jdaso, optax
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.easgd(jdaso.single_exchange(), period=4))
    """
    return elastic_averaging("easgd", exchange, period, alpha, beta, schedule, wire, nonfinite)


def easgd_center(opt_state: PyTree) -> PyTree:
    """Returns the center of :func:`jdaso.easgd` or :func:`jdaso.eamsgd`, equal on all nodes.

    It does not contain exchanges in flight. Call :func:`jdaso.drain` first after training.

    Args:
        opt_state: The state of the whole optimizer.

    Returns:
        A tree like the parameters, in float32 (float64 for float64 leaves).

    Raises:
        ValueError: if ``opt_state`` does not hold exactly one such state.

    >>> import jax.numpy as jnp, jdaso
    >>> tx = jdaso.easgd(jdaso.single_exchange(), period=4)
    >>> jdaso.easgd_center(tx.init({"w": jnp.ones(2)}))["w"].tolist()
    [1.0, 1.0]
    """
    state = averaging_state(opt_state).fragments[0].merge
    if not isinstance(state, ElasticState):
        raise ValueError("opt_state has no center: pass the state of jdaso.easgd or jdaso.eamsgd.")
    return state.center


def elastic_averaging(
    name: str,
    exchange: Exchange,
    period: int | None,
    alpha: float | None,
    beta: float,
    schedule: Schedule | None,
    wire: str | None,
    nonfinite: str,
) -> Averaging:
    """Makes the elastic averaging that :func:`easgd` and :func:`eamsgd` share."""
    schedule = resolve_schedule(name, period, period, schedule)
    nodes = exchange.num_nodes
    check_positive("beta", beta)
    limit = 2 / (nodes + 1)
    if alpha is None:
        alpha, source, choice = beta / nodes, "beta / P", f"beta below {limit * nodes:g}"
    else:
        source, choice = "alpha", f"alpha below {limit:g}"
    check_positive("alpha", alpha)
    if is_concrete("alpha", alpha) and alpha >= limit:
        warnings.warn(
            f"{name}: {source} = {alpha:g} with P = {nodes} nodes diverges for every learning rate "
            f"(easgd Condition 17, where eta h -> 0). Choose {choice}.",
            stacklevel=3,
        )
    options = {"nonfinite": nonfinite, "sync_target": BEFORE_UPDATE}
    return averaging_on_one_wire(name, exchange, schedule, _elastic_merge(alpha), wire, **options)


def _elastic_merge(alpha: float) -> Merge:
    """Applies Eq. 5 when it posts, and Eq. 6, over the nodes that contributed, when it merges."""

    def merge(leaves: Leaves, arrival: Arrival, state: ElasticState):
        centers, replace = split(state.center)
        moved = [
            round_to(c + alpha * (t - arrival.members.astype(t.dtype) * c), c.dtype)
            for c, t in zip(centers, arrival.total, strict=True)
        ]
        return leaves, ElasticState(replace(moved))

    def on_post(leaves: Leaves, state: ElasticState) -> Leaves:
        return [
            round_to(x.astype(c.dtype) - alpha * (x.astype(c.dtype) - c), x.dtype)
            for x, c in zip(leaves, split(state.center)[0], strict=True)
        ]

    def init(params: PyTree) -> ElasticState:
        return ElasticState(widened(params))

    def base(state: ElasticState) -> Leaves:
        return split(state.center)[0]

    return Merge(init, merge, on_post, leafwise=True, shared=True, base=base)
