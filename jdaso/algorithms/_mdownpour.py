"""MDOWNPOUR: the server takes the optimizer's steps, with momentum."""

from __future__ import annotations

import jax.numpy as jnp

from jdaso._base import Arrival, Leaves, Merge, PyTree
from jdaso._center import Center
from jdaso._engine import Averaging, averaging
from jdaso._leaves import difference, widened
from jdaso._subject import Subject
from jdaso.algorithms._arguments import check_positive, check_share, plain
from jdaso.algorithms._center_rules import check_center, momentum_rule
from jdaso.schedules import constant

# Gradients leave, and parameters come back.
_STEPPED_ELSEWHERE = Subject(
    lambda params, updates: updates,
    difference,
    lands=lambda params, updates: updates,
    kept=lambda leaf: jnp.full_like(leaf, jnp.nan),  # what left is no parameter to go on with
    anchored=False,
)


def mdownpour(
    center: Center, learning_rate: float, momentum: float, *, nonfinite: str = "skip"
) -> Averaging:
    """Momentum DOWNPOUR: workers send gradients, the server alone moves the centre.

    At every step of a worker, with g its gradient:

        v <- delta v - eta g;  c <- c + delta v;  x <- c              (easgd Algorithms 4, 5)

    as printed: with ``momentum=0`` the centre would stand still. There is no period, and no delay:
    a worker has nothing to compute without the reply.

    Args:
        center: where workers meet, :func:`jdaso.mpi_center` or :func:`jdaso.simulated_center`.
        learning_rate: eta; the paper's are 100 times smaller than DOWNPOUR's, for delta = 0.99.
        momentum: delta, in (0, 1).
        nonfinite: ``skip``: gradients that are not finite are not sent; ``raise`` stops.

    Returns:
        An optax transformation, a whole optimizer of gradients. ``update`` needs ``params``; one
        starts from ``center.join(params)``.

    Raises:
        ValueError: for a learning rate that is not positive, or a momentum outside (0, 1).

    >>> import jdaso
    >>> tx = jdaso.mdownpour(jdaso.simulated_center(4), learning_rate=0.01, momentum=0.9)
    """
    check_center("mdownpour", center)
    check_positive("learning_rate", learning_rate)
    check_positive("momentum", momentum)
    check_share("momentum", momentum, below_one=True)
    rate, delta = plain("learning_rate", learning_rate), plain("momentum", momentum)
    return averaging(
        "mdownpour",
        center.serve(momentum_rule(rate, delta)),
        constant(period=1, delay=0),
        Merge(init=_nothing, merge=_taken, message=_widened),
        nonfinite=nonfinite,
        subject=_STEPPED_ELSEWHERE,
    )


def _nothing(params: PyTree) -> tuple[()]:
    del params
    return ()


def _taken(leaves: Leaves, arrival: Arrival, state: PyTree):
    del leaves
    return arrival.total, state


def _widened(leaves: Leaves, state: PyTree):
    return widened(leaves), state
