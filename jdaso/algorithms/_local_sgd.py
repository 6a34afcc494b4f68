"""Local SGD: rare blocking means of parameters."""

from __future__ import annotations

from jdaso._base import Exchange, Schedule
from jdaso._engine import Averaging, averaging
from jdaso.algorithms._arguments import check_progress, chosen_schedule, chosen_wire
from jdaso.algorithms._dasgd import mixing


def local_sgd(
    exchange: Exchange,
    period: int | None = None,
    *,
    schedule: Schedule | None = None,
    wire: str | None = None,
    nonfinite: str = "skip",
) -> Averaging:
    """Local SGD, or periodic averaging.

    Every ``period`` steps, of M nodes,

        x <- (1/M) sum_j x_j                                          (dasgd Sec. II-C3)

    and training waits for it. With period 1 and plain SGD this is minibatch SGD. Post-local SGD,
    a mean at every step for some time before, is a matter of the schedule: see
    :func:`jdaso.by_step`.

    Args:
        exchange: how nodes reach each other.
        period: optimizer steps between two means.
        schedule: instead of the period. Where its delay is not 0, a mean replaces what the node
            has done meanwhile; use :func:`jdaso.dasgd` to keep some of it.
        wire: dtype that crosses the network, never one wider than a leaf itself, or ``int8``, as
            in :func:`jdaso.daso`. None: that of the exchange, or float32.
        nonfinite: ``skip`` or ``raise``, as in :func:`jdaso.daso`.

    Returns:
        An optax transformation, to be the last of a chain. ``update`` needs ``params``.

    Raises:
        ValueError: for a period below 1, a schedule whose delay is a whole period, an unknown
            wire.

    >>> import jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.local_sgd(jdaso.single_exchange(), period=8))
    """
    schedule = chosen_schedule("local_sgd", period, 0, schedule)
    check_progress("local_sgd", "a node's own weight", 0.0, schedule)
    wire = chosen_wire("wire", wire, exchange, "float32")
    return averaging(
        "local_sgd",
        exchange,
        schedule,
        mixing(0.0),
        wire=wire,
        blocking_wire=wire,
        nonfinite=nonfinite,
    )
