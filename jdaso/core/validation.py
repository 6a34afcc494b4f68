"""Checks of arguments, made before anything is traced."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable
from typing import Any

import jax

from jdaso.core.types import Schedule


def check_period_and_delay(period: int, delay: int) -> None:
    """Raises ValueError unless ``period >= 1`` and ``0 <= delay <= period``."""
    check_whole("period", period, 1)
    check_whole("delay", delay, 0)
    if delay > period:
        raise ValueError(
            f"delay must not exceed period, got delay={delay} and period={period}: the next "
            "exchange would be due while the last one is in flight."
        )


def check_phases(period: int, warmup: int, cooldown: int, total: int, epoch: int | None) -> None:
    """Raises ValueError if the phases do not fit into a run of ``total`` steps."""
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


def check_whole(name: str, value: int, least: int, bits: int = 31) -> None:
    """Raises ValueError unless a value is an integer in ``[least, 2**bits)``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}.")
    if value >= 2**bits:
        raise ValueError(f"{name} must be below 2**{bits}, got {reprlib.repr(value)}.")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises ValueError unless a value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def check_number(name: str, value: float, above: bool = False) -> None:
    """Raises ValueError unless a value is finite and at least 0, or above 0 if ``above``."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or value < 0 or (above and value == 0):
        least = "above 0" if above else "of at least 0"
        raise ValueError(f"{name} must be a finite number {least}, got {value!r}.")


def is_concrete(name: str, value: Any) -> bool:
    """Whether a number can be checked now; under optax.inject_hyperparams it is a JAX tracer.

    Raises:
        ValueError: if the value is not a number.
    """
    if isinstance(value, jax.Array):
        return not isinstance(value, jax.core.Tracer)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return True


def check_share(name: str, value: float, below_one: bool = False) -> None:
    """Raises ValueError unless a number lies in [0, 1], or in [0, 1) if ``below_one``."""
    if is_concrete(name, value) and not (0 <= value < 1 or (value == 1 and not below_one)):
        raise ValueError(f"{name} must be in [0, 1{')' if below_one else ']'}, got {value!r}.")


def check_positive(name: str, value: float) -> None:
    """Raises ValueError unless a number is positive and finite."""
    if is_concrete(name, value) and not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value!r}.")


def check_schedule(name: str, schedule: Any) -> None:
    """Raises ValueError unless ``schedule`` is a :class:`jdaso.Schedule`."""
    if not isinstance(schedule, Schedule):
        raise ValueError(
            f"{name}: schedule must be a jdaso.Schedule, such as jdaso.constant(4, 2), "
            f"got {schedule!r}."
        )


def check_fragments(count: Any, schedule: Schedule) -> None:
    """Raises ValueError for a number of fragments that a schedule cannot exchange in turn."""
    whole = isinstance(count, numbers.Integral) and not isinstance(count, bool)
    if not whole or not 1 <= count <= schedule.longest:
        raise ValueError(
            f"fragments must be an integer in [1, {schedule.longest}], got {count!r}: "
            "each fragment needs a step of its own within the longest period."
        )
