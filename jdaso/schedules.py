"""Schedules decide when to exchange. They are pure functions of step and loss on every node."""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.core.tree import where_tree
from jdaso.core.types import Number, Plan, Schedule
from jdaso.core.validation import check_period_and_delay, check_phases, check_share, check_whole

PHASES = ("warm-up", "cycling", "cool-down")
CYCLING = PHASES.index("cycling")


def constant(period: int, delay: int = 0) -> Schedule:
    """Keeps period and delay constant.

    An exchange is posted after the update of every step t with ``(t + 1) mod period == 0`` and
    merged ``delay`` steps later. It ignores the loss and does not merge at ends of epochs. Call
    :func:`jdaso.drain` after training.

    Args:
        period: Optimizer steps between two exchanges, at least 1.
        delay: Optimizer steps between posting and merging, ``0 <= delay <= period``. With 0,
            exchanges block.

    Returns:
        A :class:`jdaso.Schedule`. Its phase is always "cycling".

    Raises:
        ValueError: for a period below 1 or above 2**31 - 1, or a delay outside ``[0, period]``.

    >>> schedule = constant(period=4, delay=2)
    >>> plans = [schedule.plan(schedule.init(), step)[0] for step in range(8)]
    >>> [int(plan.posts()) for plan in plans]
    [0, 0, 0, 1, 0, 0, 0, 1]
    """
    check_period_and_delay(period, delay)

    def plan(state, step):
        return _cycling_plan(period, delay, step + 1), state

    delays = {"may_block": delay == 0, "may_delay": delay > 0, "may_coincide": delay == period}
    return Schedule(lambda: (), plan, lambda state, loss: state, period, **delays)


def by_step(function: Callable[[jax.Array], tuple[Number, Number]]) -> Schedule:
    """Takes period and delay from a function of the step.

    After every exchange, ``function`` is called with the following step. It returns the number of
    steps to the next exchange, and its delay. Post-local SGD, which averages at every step first,
    is ``local_sgd(exchange, schedule=by_step(lambda step: (jnp.where(step < 1000, 1, 8), 0)))``.

    Args:
        function: ``step -> (period, delay)``. The step is an int32 scalar counted from 0. The
            results must be integers with ``period >= 1`` and ``0 <= delay <= period``, the
            same on all nodes.

    Returns:
        A :class:`jdaso.Schedule`. Its phase is always "cycling".

    Raises:
        ValueError: if ``function`` returns anything else for one of the first 4096 steps, or for
            a later step 2^k. At all other steps its results are clipped to the valid range.

    >>> schedule = by_step(lambda step: (1 + step // 4, 0))
    >>> state, posts = schedule.init(), []
    >>> for step in range(12):
    ...     plan, state = schedule.plan(state, step)
    ...     posts.append(int(plan.posts()))
    >>> posts
    [1, 1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 0]
    """
    # optax.inject_hyperparams makes the schedule inside jit.
    with jax.ensure_compile_time_eval():
        checked = jnp.array([*range(4096), *(2**k for k in range(12, 31))], jnp.int32)
        try:
            results = jax.vmap(function)(checked)
        except OverflowError:
            raise ValueError("by_step: function must return numbers below 2**31.") from None
        if not isinstance(results, tuple) or len(results) != 2:
            kind = type(results).__name__
            raise ValueError(f"by_step: function must return (period, delay), got a {kind}.")
        periods, delays = (np.broadcast_to(x, checked.shape) for x in results)
    for step, period, delay in zip(checked.tolist(), periods, delays, strict=True):
        try:
            check_period_and_delay(period.item(), delay.item())
        except ValueError as error:
            raise ValueError(f"by_step: function({step}): {error}") from None

    def plan(last, step):
        # The period stays until the next exchange, so that every fragment is exchanged once.
        period, delay = (jnp.asarray(x, jnp.int32) for x in function(last + 1))
        period = jnp.maximum(period, 1)
        plan = _cycling_plan(period, jnp.clip(delay, 0, period), step - last)
        return plan, jnp.where(plan.posts(), jnp.asarray(step, jnp.int32), last)

    return Schedule(lambda: jnp.int32(-1), plan, lambda state, loss: state, int(periods.max()))


def linear(start: tuple[int, int], end: tuple[int, int], steps: int) -> Schedule:
    """Changes period and delay linearly, and then keeps them constant.

    Args:
        start: ``(period, delay)`` at step 0.
        end: ``(period, delay)`` from step ``steps`` on.
        steps: Optimizer steps between the two. Values in between are rounded down.

    Returns:
        A :class:`jdaso.Schedule` made by :func:`by_step`.

    Raises:
        ValueError: for a period below 1, a delay outside ``[0, period]``, no steps, or a number
            from 2**31 on.

    >>> schedule = linear(start=(1, 0), end=(4, 2), steps=6)
    >>> state, posts = schedule.init(), []
    >>> for step in range(12):
    ...     plan, state = schedule.plan(state, step)
    ...     posts.append(int(plan.posts()))
    >>> posts
    [1, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    """
    check_whole("steps", steps, 1)
    for name, pair in (("start", start), ("end", end)):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"linear: {name} must be (period, delay), got {pair!r}.")
        check_period_and_delay(*pair)

    period, delay = (_interpolation(a, b, steps) for a, b in zip(start, end, strict=True))
    return by_step(lambda step: (period(step), delay(step)))


def _interpolation(start: int, end: int, steps: int) -> Callable[[jax.Array], jax.Array]:
    """Returns ``start + floor((end - start) * step / steps)`` as a function of the step.

    It reads a table of the steps where the value changes, because neither float32 nor an int32
    product is exact for all steps of a long run.
    """
    changes = range(1, abs(end - start) + 1)
    if end > start:
        changed_at = [-(-k * steps // len(changes)) for k in changes]
    else:
        changed_at = [(k - 1) * steps // len(changes) + 1 for k in changes]
    sign = 1 if end > start else -1

    def value(step: jax.Array) -> jax.Array:
        return start + sign * jnp.searchsorted(jnp.array(changed_at, jnp.int32), step, side="right")

    return value


class CyclingState(NamedTuple):
    """Period and delay of the cycling phase, and the state of the plateau test."""

    period: jax.Array
    delay: jax.Array
    best: jax.Array
    bad_epochs: jax.Array


def cycling(
    period: int,
    warmup: int,
    cooldown: int,
    total: int,
    epoch: int | None = None,
    delay: int | None = None,
    threshold: float = 0.05,
    patience: int = 2,
) -> Schedule:
    """DASO's three phases: blocking warm-up, cycling, blocking cool-down.

    In warm-up and cool-down every step ends with a blocking exchange (period 1, delay 0). The
    cycling phase starts with ``(period, delay) = (B, S)``. Each time the training loss reaches a
    plateau, both are halved (rounded down, never below 1). When both are 1 and the loss reaches
    another plateau, both return to ``(B, S)`` (daso-preprint Sec. 3, daso-journal Fig. 5). Heat,
    the authors' code, halves the period as well, but subtracts 1 from the delay.

    The loss is the mean of ``value=``, an argument of ``update``, over an epoch and all nodes.
    Without it, period and delay do not change. The papers do not define a plateau. As in Heat, it
    is reached after more than ``patience`` consecutive epochs of the cycling phase without a loss
    below ``best * (1 - threshold)``. At the end of every epoch, and of the whole run, all exchanges
    in flight are merged, followed by one blocking mean, which also carries the loss. This mean is
    Heat's too, and the papers do not mention it.

    Args:
        period: B, optimizer steps between two exchanges of the cycling phase, at least 1.
        warmup: Optimizer steps of the warm-up phase, at the start. The papers give the length of
            neither blocking phase. Heat's defaults are 4 epochs for each, of 90 in its script.
        cooldown: Optimizer steps of the cool-down phase, at the end.
        total: Optimizer steps of the whole run. Every further step is one of the cool-down, and
            blocks. The first one is logged as a warning.
        epoch: Optimizer steps of an epoch. None: no epochs, and therefore no plateaus. An epoch
            that is shorter than the period causes a warning.
        delay: S, optimizer steps between posting and merging in the cycling phase. None selects
            ``max(1, B // 4)``, which the authors found to be best (daso-preprint Sec. 3).
        threshold: Smallest relative improvement of the loss that counts, in [0, 1).
        patience: Epochs without improvement that are not yet a plateau.

    Returns:
        A :class:`jdaso.Schedule`. Its phases are indices of ``jdaso.schedules.PHASES``.

    Raises:
        ValueError: for values that are out of range or do not fit together.

    >>> schedule = cycling(period=4, warmup=10, cooldown=10, total=90, epoch=10)
    >>> plan, _ = schedule.plan(schedule.init(), 13)
    >>> PHASES[int(plan.phase)], int(plan.period), int(plan.delay), bool(plan.posts())
    ('cycling', 4, 1, True)
    """
    check_whole("period", period, 1)
    delay = max(1, period // 4) if delay is None else delay
    check_period_and_delay(period, delay)
    check_phases(period, warmup, cooldown, total, epoch)
    check_share("threshold", threshold, below_one=True)
    check_whole("patience", patience, 0)
    if epoch is not None and epoch < period and warmup + cooldown < total:
        warnings.warn(
            f"cycling with epoch={epoch} and period={period} waits for the mean at the end of each "
            "epoch, more often than it exchanges in the background. Choose a period that is "
            "shorter than an epoch, or epoch=None, which has no such mean and no plateaus.",
            stacklevel=2,
        )
    cooldown_start = total - cooldown

    def init() -> CyclingState:
        worst = jnp.float32(np.finfo(np.float32).max)  # not inf, which jax_debug_infs refuses
        return CyclingState(jnp.int32(period), jnp.int32(delay), worst, jnp.int32(0))

    def plan(state: CyclingState, step: jax.Array) -> tuple[Plan, CyclingState]:
        step = jnp.asarray(step, jnp.int32)
        phase = jnp.int32(step >= warmup) + jnp.int32(step >= cooldown_start)
        # If warmup == cooldown_start there is no cycling phase, and phase jumps from 0 to 2.
        start = jnp.array([0, warmup, cooldown_start], jnp.int32)[phase]
        blocking = phase != CYCLING
        epoch_end = step + 1 == total
        if epoch is not None:
            epoch_end |= (step + 1) % epoch == 0
        phase_end = (step + 1 == warmup) | (step + 1 == cooldown_start)
        plan = Plan(
            phase=phase,
            period=jnp.where(blocking, 1, state.period),
            delay=jnp.where(blocking | epoch_end | phase_end, 0, state.delay),
            clock=step - start + 1,
            flush=epoch_end | phase_end,
            blocking=blocking,
            epoch_end=epoch_end,
        )
        return plan, state

    def observe(state: CyclingState, loss: jax.Array) -> CyclingState:
        margin = jnp.where(state.best >= 0, 1 - threshold, 1 + threshold)
        better = loss < state.best * margin
        best = jnp.where(better, loss, state.best)
        bad_epochs = jnp.where(better, 0, state.bad_epochs + 1)
        restart = (state.period == 1) & (state.delay <= 1)
        next_period = jnp.where(restart, period, jnp.maximum(1, state.period // 2))
        # An initial delay of 0 stays 0: halving must not make exchanges less blocking.
        next_delay = jnp.where(restart, delay, jnp.maximum(min(1, delay), state.delay // 2))
        new = CyclingState(next_period, next_delay, best, jnp.int32(0))
        same = state._replace(best=best, bad_epochs=bad_epochs)
        return where_tree(bad_epochs > patience, new, same)

    return Schedule(init, plan, observe, longest=period, total=total, may_delay=delay > 0)


def _cycling_plan(period: Number, delay: Number, clock: Number) -> Plan:
    """Returns the plan of a schedule without phases and epochs."""
    no = jnp.bool_(False)
    return Plan(
        jnp.int32(CYCLING), jnp.int32(period), jnp.int32(delay), jnp.int32(clock), no, no, no
    )
