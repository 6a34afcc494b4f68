"""Checks of arguments, before anything is traced."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable


def check_period_and_delay(period: int, delay: int) -> None:
    """Raises ValueError for a period or a delay that cannot be."""
    check_whole("period", period, 1)
    check_whole("delay", delay, 0)
    if delay > period:
        raise ValueError(
            f"delay must not exceed period, got delay={delay} and period={period}: the next "
            "exchange would be due while the last one is still in flight."
        )


def check_phases(period: int, warmup: int, cooldown: int, total: int, epoch: int | None) -> None:
    """Raises ValueError for phases that do not fit into a run."""
    check_whole("warmup", warmup, 0)
    check_whole("cooldown", cooldown, 0)
    check_whole("total", total, 1)
    if epoch is not None:
        check_whole("epoch", epoch, 1)
    if warmup + cooldown > total:
        raise ValueError(
            f"warmup + cooldown must not exceed total, got {warmup} + {cooldown} > {total}."
        )
    steps = total - warmup - cooldown
    if 0 < steps < period:
        raise ValueError(
            f"period must fit into the cycling phase, got period={period} and a phase of "
            f"{steps} steps (total - warmup - cooldown)."
        )


def check_whole(name: str, value: int, least: int) -> None:
    """Raises ValueError, naming the argument, unless a value is a whole number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises ValueError, naming the argument, unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def check_number(name: str, value: float, above: bool = False) -> None:
    """Raises ValueError unless a value is a finite number of at least, or above, 0."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < 0 or (above and value == 0):
        least = "above 0" if above else "of at least 0"
        raise ValueError(f"{name} must be a finite number {least}, got {value!r}.")
