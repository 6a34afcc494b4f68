"""What the factories of the algorithms share: schedule, wire, and the rules of a merge."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jdaso.core.exchange import Exchange
from jdaso.core.transformation import Averaging, averaging
from jdaso.core.types import Arrival, Leaves, Merge, PyTree, Schedule
from jdaso.core.validation import check_choice, check_schedule, is_concrete
from jdaso.core.wire import check_wire
from jdaso.schedules import constant


def resolve_schedule(
    name: str, period: int | None, delay: int | None, schedule: Schedule | None
) -> Schedule:
    """Returns the given schedule, or a constant one with the given period and delay.

    Raises:
        ValueError: if both or neither are given, or if period and delay do not fit together.
    """
    if isinstance(period, Schedule):
        raise ValueError(
            f"{name} requires the schedule as a keyword argument: {name}(exchange, schedule=...)."
        )
    if schedule is not None:
        check_schedule(name, schedule)
        if period is None and not delay:
            return schedule
    if period is None or schedule is not None:
        raise ValueError(
            f"{name} requires either a period or a schedule, which has a delay of its own; got "
            f"period={period!r}, delay={delay!r} and {'a' if schedule else 'no'} schedule."
        )
    if delay is None:
        raise ValueError(
            f"{name}(period={period}) requires a delay in steps; with delay=0 exchanges block."
        )
    return constant(period, delay)


def resolve_wire(name: str, wire: str | None, exchange: Exchange, default: str) -> str:
    """Returns the given wire, the one of the exchange, or the algorithm's default.

    Raises:
        ValueError: for an unknown wire, or an exchange of the wrong type or for another wire.
    """
    if not isinstance(exchange, Exchange):
        raise ValueError(
            "exchange must be a jdaso.Exchange, such as jdaso.mpi_exchange(topology), got "
            f"{type(exchange).__name__}."
        )
    wire = check_wire(name, wire)
    if wire is not None and exchange.wire not in (None, wire):
        raise ValueError(
            f"{name}={wire!r} contradicts the exchange, which was made with "
            f"wire={exchange.wire!r}; set the wire in one place only."
        )
    return wire or exchange.wire or default


def averaging_on_one_wire(
    name: str,
    exchange: Exchange,
    schedule: Schedule,
    merge: Merge,
    wire: str | None,
    **options: Any,
) -> Averaging:
    """Calls :func:`jdaso.core.averaging` with the same wire in blocking and in other phases."""
    wire = resolve_wire("wire", wire, exchange, "float32")
    return averaging(name, exchange, schedule, merge, wire=wire, blocking_wire=wire, **options)


def mixing_merge(own: float) -> Merge:
    """Returns the merge rule ``x <- own x + (1 - own) mean``."""

    def merge(leaves: Leaves, arrival: Arrival, state: PyTree) -> tuple[Leaves, PyTree]:
        return mix_leaves(own, leaves, arrival.mean), state

    return Merge(lambda params: (), merge, own_weight=lambda arrival: own, leafwise=True)


def choose_merge(choice: str, mean: Merge, weight: Callable[[Arrival], jax.Array | float]) -> Merge:
    """Returns the rule ``mean``, or for ``delta`` the rule ``x <- x + b (mean_i x_i - x_posted)``.

    ``weight`` computes b. If all nodes contribute, the corrections of ``delta`` sum to zero, so the
    mean of the nodes stays where their steps have brought it.

    Raises:
        ValueError: for another choice.
    """
    check_choice("merge", choice, ("mean", "delta"))
    if choice == "mean":
        return mean

    def merge(leaves: Leaves, arrival: Arrival, state: PyTree) -> tuple[Leaves, PyTree]:
        b = weight(arrival)
        return [x + b * change for x, change in zip(leaves, arrival.mean, strict=True)], state

    # The state tells a checkpoint of this rule from others, whose sums in flight differ.
    return Merge(lambda params: {"delta": jnp.zeros((), bool)}, merge, leafwise=True, relative=True)


def mix_leaves(own: float, leaves: Leaves, others: Leaves) -> Leaves:
    """Returns ``own x + (1 - own) y``; for the number 0 exactly y, even where x is not finite."""
    if is_concrete("own", own) and own == 0:
        return others
    return [own * x + (1 - own) * y for x, y in zip(leaves, others, strict=True)]
