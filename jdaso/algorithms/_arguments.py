"""What the factories of algorithms have in common: schedule, wire, and checks of numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any

import jax

from jdaso._base import Exchange, Schedule
from jdaso._engine import check_schedule
from jdaso._wire import check_wire
from jdaso.schedules import constant


def chosen_schedule(
    name: str, period: int | None, delay: int | None, schedule: Schedule | None
) -> Schedule:
    """A constant schedule of period and delay, or the one that was given instead of them.

    Raises:
        ValueError: if there is neither or both, or period and delay do not fit.
    """
    if isinstance(period, Schedule):
        raise ValueError(f"{name} takes a schedule by name: {name}(exchange, schedule=...).")
    if schedule is not None:
        check_schedule(name, schedule)
        if period is None and not delay:
            return schedule
    if period is None or schedule is not None:
        raise ValueError(
            f"{name} needs either a period or a schedule, which has its own delay; got "
            f"period={period!r}, delay={delay!r} and {'a' if schedule else 'no'} schedule."
        )
    if delay is None:
        raise ValueError(f"{name}(period={period}) needs a delay, in steps; 0 blocks.")
    return constant(period, delay)


def is_known(argument: str, value: Any) -> bool:
    """Whether a number can be checked now; one that optax.inject_hyperparams traces cannot.

    Raises:
        ValueError: if it is no number at all.
    """
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{argument} must be a number, got {value!r}.")
    return True


def plain(argument: str, value: Any) -> Any:
    """Python's number, where it is known: NumPy's float64 would make float32 arrays wide."""
    return float(value) if is_known(argument, value) else value


def check_share(argument: str, value: float, below_one: bool = False) -> None:
    """Raises ValueError unless a number lies in [0, 1], or in [0, 1)."""
    if is_known(argument, value) and not (0 <= value < 1 or (value == 1 and not below_one)):
        raise ValueError(f"{argument} must be in [0, 1{')' if below_one else ']'}, got {value!r}.")


def check_positive(argument: str, value: float) -> None:
    """Raises ValueError unless a number is positive and finite."""
    if is_known(argument, value) and not 0 < value < math.inf:
        raise ValueError(f"{argument} must be positive, got {value!r}.")


def check_progress(name: str, share: str, value: float, schedule: Schedule) -> None:
    """Raises ValueError if all steps between two exchanges would be thrown away.

    What arrives after a whole period is older than all of them; if nothing of a node's own
    parameters is kept then, training stands still.
    """
    if is_known(share, value) and value == 0 and schedule.delay_fills_period:
        raise ValueError(
            f"{name}: delay must be less than period where {share} is 0, or every step would be "
            f"lost; got a schedule whose delay is as long as its period (of {schedule.longest} "
            "steps at most, or of 1 in the end if it cycles)."
        )


def mixed(own: float, leaves: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    """``own x + (1 - own) y``; for the number 0 exactly y, whatever x is."""
    if is_known("own", own) and own == 0:
        return others
    return [own * x + (1 - own) * y for x, y in zip(leaves, others, strict=True)]


def chosen_wire(name: str, wire: str | None, exchange: Exchange, default: str) -> str:
    """The wire of an algorithm: what was asked for, that of its exchange, or its default.

    Raises:
        ValueError: if what was asked for is no wire, the exchange is none, or bound to another.
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
            f"wire={exchange.wire!r}; give it in one place."
        )
    return wire or exchange.wire or default
