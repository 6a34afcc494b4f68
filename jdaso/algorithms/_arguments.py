"""What the factories of algorithms have in common: their schedule, and checks of numbers."""

from __future__ import annotations

import math

from jdaso._base import Schedule
from jdaso.schedules import constant


def chosen_schedule(
    name: str, period: int | None, delay: int | None, schedule: Schedule | None
) -> Schedule:
    """A constant schedule of period and delay, or the one that was given instead of them.

    Raises:
        ValueError: if there is neither or both, or period and delay do not fit.
    """
    if schedule is not None and period is None:
        return schedule
    if period is None or schedule is not None:
        raise ValueError(
            f"{name} needs either a period or a schedule, got period={period!r} and "
            f"{'no' if schedule is None else 'a'} schedule."
        )
    if delay is None:
        raise ValueError(f"{name}(period={period}) needs a delay, in steps; 0 blocks.")
    return constant(period, delay)


def check_share(argument: str, value: float) -> None:
    """Raises ValueError unless a number lies in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{argument} must be in [0, 1], got {value!r}.")


def check_positive(argument: str, value: float) -> None:
    """Raises ValueError unless a number is positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{argument} must be positive, got {value!r}.")


def check_progress(share: str, value: float, period: int | None, delay: int | None) -> None:
    """Raises ValueError if all steps between two exchanges would be thrown away.

    What arrives after a whole period is older than all of them; if nothing of a node's own
    parameters is kept then, training stands still.
    """
    if value == 0 and period is not None and 0 < period == delay:
        raise ValueError(
            f"delay must be less than period where {share}=0, got delay={delay} and "
            f"period={period}: every step would be lost. Use a delay of at most {period - 1}, or "
            f"{share} > 0."
        )
