"""ADMM in turns, to compare its stability with that of EASGD."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso.center.downpour import summing_rule
from jdaso.center.types import Center, check_center
from jdaso.core.exchange import HEADER_SIZE
from jdaso.core.tree import split, widened
from jdaso.core.types import Leaves, PyTree
from jdaso.core.validation import check_positive


class AdmmState(NamedTuple):
    multiplier: PyTree  # lambda, like the parameters but widened
    exchange: PyTree


def admm(center: Center, learning_rate: float, rho: float) -> optax.GradientTransformation:
    """The alternating direction method of multipliers, linearized, in turns (easgd Eq. 9 to 11).

    At each turn of a worker, with g its gradient at x and lambda its multiplier:

        lambda <- lambda - (x - c)
        x <- (x - eta g + eta rho (lambda + c)) / (1 + eta rho)
        c <- (1/p) sum_i (x_i - lambda_i)

    All workers start from x = c and lambda = 0. It serves comparisons only: in turns it diverges
    for many eta and rho (Fig. 1), such as 0.001 and 2.5 with 3 workers and ``F = x^2/2``.

    Args:
        center: A :func:`jdaso.center.simulated_center`, because a turn needs two exchanges.
        learning_rate: eta.
        rho: Penalty.

    Returns:
        An optax transformation, a complete optimizer. ``update`` requires ``params``.

    Raises:
        ValueError: for numbers that are not positive or a center over MPI.

    >>> import jdaso
    >>> tx = jdaso.center.admm(jdaso.center.simulated_center(3), learning_rate=0.001, rho=2.5)
    """
    check_center("admm", center)
    check_positive("learning_rate", learning_rate)
    check_positive("rho", rho)
    if not center.in_turns:
        raise ValueError(
            "admm needs a simulated_center, got a center over MPI: a worker reads and writes the "
            "center in one turn, and over MPI others would intervene."
        )
    exchange = center.make_exchange(summing_rule())
    header = jnp.zeros((HEADER_SIZE,), jnp.float32).at[0].set(1.0)
    force, workers = learning_rate * rho, center.num_workers

    def exchanged(state: PyTree, message: Leaves) -> tuple[PyTree, Leaves]:
        bound = exchange.bind((), message)
        state, number = bound.post(state, 0, 0, message, header, None)
        reply, _, state = bound.collect(state, number, message)
        return state, reply

    def init(params: PyTree) -> AdmmState:
        return AdmmState(jax.tree.map(jnp.zeros_like, widened(params)), exchange.init(params))

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("admm requires params: call update(grads, state, params).")
        xs, _ = split(params)
        gradients, where = split(updates)
        old, multipliers_where = split(state.multiplier)
        wide = widened(xs)
        inner, center = exchanged(state.exchange, [jnp.zeros_like(x) for x in wide])
        multipliers = [m - (x - c) for m, x, c in zip(old, wide, center, strict=True)]
        moved = [
            (x - learning_rate * g + force * (m + c)) / (1 + force)
            for x, g, m, c in zip(wide, gradients, multipliers, center, strict=True)
        ]
        # The change of this worker's term in the sum of Eq. 11 since its last turn.
        changed = [
            ((y - m) - (x - b)) / workers
            for x, y, b, m in zip(wide, moved, old, multipliers, strict=True)
        ]
        inner, _ = exchanged(inner, changed)
        steps = [(y - x).astype(x.dtype) for x, y in zip(wide, moved, strict=True)]
        return where(steps), AdmmState(multipliers_where(multipliers), inner)

    return optax.GradientTransformation(init, update)
