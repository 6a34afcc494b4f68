"""ADMM in turns, only to show that it can diverge where EASGD cannot."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso._base import HEADER_SIZE, Leaves, PyTree
from jdaso._center import Center
from jdaso._leaves import split, widened
from jdaso.algorithms._arguments import check_positive
from jdaso.algorithms._center_rules import check_center, summing_rule


class AdmmState(NamedTuple):
    """lambda, a tree like the parameters, widened, and the state of the exchange."""

    multiplier: PyTree
    exchange: PyTree


def admm(center: Center, learning_rate: float, rho: float) -> optax.GradientTransformation:
    """The alternating direction method of multipliers, linearized, in turns (easgd Eq. 9 to 11).

    At a turn of a worker, with g its gradient at x, lambda its own multiplier:

        lambda <- lambda - (x - c)
        x <- (x - eta g + eta rho (lambda + c)) / (1 + eta rho)
        c <- (1/p) sum_i (x_i - lambda_i)

    It starts from x = c and lambda = 0 in all workers. For comparisons: in turns it diverges for
    many eta and rho (Fig. 1), for instance 0.001 and 2.5 with 3 workers and ``F = x^2/2``, where
    each turn alone is stable.

    Args:
        center: a :func:`jdaso.simulated_center`; another worker must not come in between.
        learning_rate: eta.
        rho: penalty.

    Returns:
        An optax transformation, a whole optimizer. ``update`` needs ``params``.

    Raises:
        ValueError: for numbers that are not positive, or a centre over MPI.

    >>> import jdaso
    >>> tx = jdaso.admm(jdaso.simulated_center(3), learning_rate=0.001, rho=2.5)
    """
    check_center("admm", center)
    check_positive("learning_rate", learning_rate)
    check_positive("rho", rho)
    if not center.in_turns:
        raise ValueError(
            "admm needs a simulated_center: a worker reads and writes the centre in one turn, "
            "which over MPI others would interrupt."
        )
    exchange = center.serve(summing_rule())
    header = jnp.zeros((HEADER_SIZE,), jnp.float32).at[0].set(1.0)
    force, workers = learning_rate * rho, center.num_workers

    def met(state: PyTree, message: Leaves) -> tuple[PyTree, Leaves]:
        state, number = exchange.start(state, 0, 0, message, header, None)
        reply, _, state = exchange.finish(state, number, message)
        return state, reply

    def init(params: PyTree) -> AdmmState:
        zeros = jax.tree.map(jnp.zeros_like, widened(params))
        return AdmmState(zeros, exchange.init(params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("admm moves parameters: call update(grads, state, params).")
        xs, _ = split(params)
        gradients, where = split(updates)
        old, multipliers_where = split(state.multiplier)
        wide = widened(xs)
        inner, center = met(state.exchange, [jnp.zeros_like(x) for x in wide])
        multipliers = [m - (x - c) for m, x, c in zip(old, wide, center, strict=True)]
        moved = [
            (x - learning_rate * g + force * (m + c)) / (1 + force)
            for x, g, m, c in zip(wide, gradients, multipliers, center, strict=True)
        ]
        # Its share of the sum of Eq. 11, less that of its last turn.
        changed = [
            ((y - m) - (x - b)) / workers
            for x, y, b, m in zip(wide, moved, old, multipliers, strict=True)
        ]
        inner, _ = met(inner, changed)
        steps = [(y - x).astype(x.dtype) for x, y in zip(wide, moved, strict=True)]
        return where(steps), AdmmState(multipliers_where(multipliers), inner)

    return optax.GradientTransformation(init, update)
