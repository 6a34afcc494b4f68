"""EASGD: nodes explore, held to a common centre by an elastic force."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from jdaso._base import Arrival, Exchange, Leaves, Merge, PyTree, Schedule
from jdaso._engine import Averaging, averaging
from jdaso._leaves import split, widened
from jdaso._state import averaging_state
from jdaso._subject import BEFORE
from jdaso.algorithms._arguments import check_positive, chosen_schedule, chosen_wire, is_known


class ElasticState(NamedTuple):
    """The centre, a tree like the parameters, float32 (float64 for float64 leaves)."""

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
    gradient was taken, c the centre, u the local optimizer's update, P the nodes:

        x <- x + u - alpha (x - c)                                         (easgd Eq. 5)
        c <- c + alpha sum_i (x_i - c)                                     (easgd Eq. 6)

    with the old x and c on both right sides. The new centre is needed a period later at the
    earliest, so the sum flies for a whole period: the arithmetic is that of the blocking
    algorithm, and nothing is late.

    Args:
        exchange: how nodes reach each other.
        period: tau, optimizer steps between two exchanges.
        alpha: moving rate; None: ``beta / (P period)`` (footnote 8).
        beta: used where alpha is None; at every exchange the centre follows the mean of the
            nodes by the share ``P alpha = beta / period``.
        schedule: instead of the period; needs ``alpha``. Its delay changes when training waits
            for the sum and, as long as all nodes are finite, no number. What it wants at the end
            of a step happens before the update of the next one, also at the end of an epoch.
        wire: dtype that crosses the network, never one wider than a leaf itself, or ``int8``, as
            in :func:`jdaso.daso`. None: that of the exchange, or float32.
        nonfinite: ``skip`` or ``raise``, as in :func:`jdaso.daso`.

    Returns:
        An optax transformation, to be the last of a chain. ``update`` needs ``params``. The
        centre, which is what one evaluates and saves, is ``easgd_center(opt_state)``; it starts
        as the parameters given to ``init``, which have to be the same on all nodes: over MPI the
        first exchange, and every later one, is an error if centres differ.

    Raises:
        ValueError: for an alpha or a beta that is not positive, a period below 1, an unknown
            wire.

    Warns:
        UserWarning: if the centre diverges for every learning rate (easgd Condition 17).

    References:
        Zhang, Choromanska, LeCun, Deep learning with elastic averaging SGD, NeurIPS 2015.

    >>> import jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.easgd(jdaso.single_exchange(), period=4))
    """
    return elastic("easgd", exchange, period, alpha, beta, schedule, wire, nonfinite)


def easgd_center(opt_state: PyTree) -> PyTree:
    """The centre of :func:`jdaso.easgd` or :func:`jdaso.eamsgd`, the same on all nodes.

    What is in flight is not in it yet; after training, call :func:`jdaso.drain` first.

    Args:
        opt_state: the whole optimizer's state.

    Returns:
        A tree like the parameters, in float32 (float64 for float64 leaves).

    Raises:
        ValueError: if there is no such state, or more than one.

    >>> import jax.numpy as jnp, jdaso
    >>> tx = jdaso.easgd(jdaso.single_exchange(), period=4)
    >>> jdaso.easgd_center(tx.init({"w": jnp.ones(2)}))["w"].tolist()
    [1.0, 1.0]
    """
    state = averaging_state(opt_state).flights[0].merge
    if not isinstance(state, ElasticState):
        raise ValueError("opt_state has no centre: it is not that of easgd or eamsgd.")
    return state.center


def elastic(
    name: str,
    exchange: Exchange,
    period: int | None,
    alpha: float | None,
    beta: float,
    schedule: Schedule | None,
    wire: str | None,
    nonfinite: str,
) -> Averaging:
    """What :func:`easgd` and :func:`eamsgd` have in common."""
    schedule = chosen_schedule(name, period, period, schedule)
    nodes = exchange.num_nodes
    check_positive("beta", beta)
    given = "alpha"
    if alpha is None:
        if period is None:
            raise ValueError(f"{name} needs alpha where a schedule is given instead of a period.")
        alpha, given = beta / (nodes * period), "beta / (P period)"
    check_positive("alpha", alpha)
    limit = 2 / (nodes + 1)
    if is_known("alpha", alpha) and alpha >= limit:
        best = f"alpha below {limit:g}"
        if period is not None:
            best += f", or beta below {limit * nodes * period:g}"
        warnings.warn(
            f"{name}: {given} = {alpha:g} with P = {nodes} nodes diverges for every learning rate "
            f"(easgd Condition 17, where eta h -> 0). Choose {best}.",
            stacklevel=3,
        )
    wire = chosen_wire("wire", wire, exchange, "float32")
    return averaging(
        name,
        exchange,
        schedule,
        _elastic_merge(alpha),
        wire=wire,
        blocking_wire=wire,
        nonfinite=nonfinite,
        subject=BEFORE,
    )


def _elastic_merge(alpha: float) -> Merge:
    """Eq. 5 at departure, Eq. 6 at arrival; what was left out of the sum pulls no centre."""

    def merge(leaves: Leaves, arrival: Arrival, state: ElasticState):
        center, where = split(state.center)
        moved = [
            (c + alpha * (t - arrival.members.astype(t.dtype) * c)).astype(c.dtype)
            for c, t in zip(center, arrival.total, strict=True)
        ]
        return leaves, ElasticState(where(moved))

    def depart(leaves: Leaves, state: ElasticState) -> Leaves:
        center, _ = split(state.center)
        return [
            (x - alpha * (x.astype(c.dtype) - c)).astype(x.dtype)
            for x, c in zip(leaves, center, strict=True)
        ]

    return Merge(lambda params: ElasticState(widened(params)), merge, depart, shared=True)
