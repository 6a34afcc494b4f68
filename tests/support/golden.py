"""DASO as a NumPy recursion over all nodes at once, the numbers that the library has to reproduce.

Written from the papers (daso-preprint Sec. 3, daso-journal Eq. 2 and Fig. 5, Heat's plateau test),
not from the library: no jax, no jdaso. What the papers leave open is said where it is decided.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

WARMUP, CYCLING, COOLDOWN = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Arguments of ``jdaso.cycling`` by the same names, complete: delay is given, never derived."""

    period: int
    delay: int
    warmup: int = 0
    cooldown: int = 0
    total: float = math.inf
    epoch: float = math.inf
    threshold: float = 0.05
    patience: int = 2

    def phase(self, t: int) -> tuple[int, int, float]:
        """Phase of step t, its first step, and the step after its last."""
        if t < self.warmup:
            return WARMUP, 0, self.warmup
        if t < self.total - self.cooldown:
            return CYCLING, self.warmup, self.total - self.cooldown
        return COOLDOWN, int(self.total - self.cooldown), self.total

    def epoch_ends(self, t: int) -> bool:
        """Whether step t is the last of an epoch; the run's end cuts the last epoch short."""
        return t + 1 == self.total or (self.epoch < math.inf and (t + 1) % self.epoch == 0)


class Plateau:
    """Heat's test: no relative improvement over the best for more than ``patience`` epochs."""

    def __init__(self, threshold: float, patience: int):
        self.threshold, self.patience = threshold, patience
        self.best, self.bad_epochs = math.inf, 0

    def reached(self, loss: float) -> bool:
        goal = self.best - self.threshold * abs(self.best) if self.best < math.inf else math.inf
        if loss < goal:
            self.best, self.bad_epochs = loss, 0
        else:
            self.bad_epochs += 1
        if self.bad_epochs <= self.patience:
            return False
        self.bad_epochs = 0
        return True


class Cycle:
    """(B, S) of the cycling phase: halved on a plateau, from (1, 1) back to the start.

    daso-preprint Sec. 3. Not in the paper: a schedule that starts with S = 0, blocking, stays so.
    """

    def __init__(self, schedule: Schedule):
        self.start = (schedule.period, schedule.delay)
        self.period, self.delay = self.start
        self.plateau = Plateau(schedule.threshold, schedule.patience)

    def epoch_loss(self, loss: float) -> None:
        if not self.plateau.reached(loss):
            return
        lowest = (1, min(1, self.start[1]))
        if (self.period, self.delay) == lowest:
            self.period, self.delay = self.start
        else:
            self.period = max(lowest[0], self.period // 2)
            self.delay = max(lowest[1], self.delay // 2)


class Post(NamedTuple):
    """What is in flight: the sum over the nodes that contributed, how many, and since when."""

    total: np.ndarray
    members: int
    step: int
    delay: int


class Trajectory(NamedTuple):
    """A run of T steps of P nodes, each entry as it is after the step.

    ``params`` is (T, P, n); ``period``, ``delay`` (0 where a phase or an epoch ends), ``phase`` and
    ``in_flight`` are (T,);
    ``ages`` holds for each step the ages of what was merged in it, in that order;
    ``left_out`` is (P,), how often a node could not contribute to a sum.
    """

    params: np.ndarray
    period: np.ndarray
    delay: np.ndarray
    phase: np.ndarray
    in_flight: np.ndarray
    ages: list[list[int]]
    left_out: np.ndarray


def rounded(x: np.ndarray, wire: str) -> np.ndarray:
    """x as it arrives after having travelled in the wire's dtype."""
    return x.astype(getattr(ml_dtypes, wire, wire)).astype(x.dtype)


def posted(x: np.ndarray, step: int, delay: int, wire: str | None) -> tuple[Post, np.ndarray]:
    """sum_i x_i over the nodes (rows of x) that are finite, and which nodes these are.

    With a wire, what leaves a node is rounded, and so is the sum that comes back.
    """
    sound = np.isfinite(x).all(axis=1)
    sent = x[sound] if wire is None else rounded(x[sound], wire)
    total = sent.sum(axis=0) if wire is None else rounded(sent.sum(axis=0), wire)
    return Post(total, int(sound.sum()), step, delay), sound


def merged(x: np.ndarray, post: Post, age: int) -> np.ndarray:
    """daso-journal Eq. 2: ``x <- (2 S x + sum_i x_i(t)) / (2 S + P)``, S = age, P = members.

    A node that is not finite takes the others' mean; nothing is merged if nobody contributed.
    """
    if post.members == 0:
        return x
    sound = np.isfinite(x).all(axis=1, keepdims=True)
    own = np.where(sound, x, post.total / post.members)
    return (2 * age * own + post.total) / (2 * age + post.members)


def daso(
    x: np.ndarray,
    grads: np.ndarray,
    schedule: Schedule,
    lr: float,
    momentum: float = 0.0,
    losses: np.ndarray | None = None,
    wire: str | None = None,
    blocking_wire: str | None = None,
) -> Trajectory:
    """Runs P nodes that each take an SGD step, and average as DASO does.

    Args:
        x: (P, n), the nodes' parameters; its dtype is that of the arithmetic.
        grads: (T, P, n), gradient of each node in each step.
        schedule: period, delay and phases.
        lr: learning rate.
        momentum: m in ``v <- m v + g``, ``x <- x - lr v``.
        losses: (T, P), each node's loss in each step; None: period and delay never change.
        wire: dtype that crosses in the cycling phase; None: that of x.
        blocking_wire: the same in warm-up and cool-down.
    """
    steps, nodes = grads.shape[:2]
    cycle, flight, v = Cycle(schedule), None, np.zeros_like(x)
    left_out, heard, history, ages = np.zeros(nodes, int), [], [], []
    for t in range(steps):
        phase, start, end = schedule.phase(t)
        blocking = phase != CYCLING
        epoch_end = schedule.epoch_ends(t)
        finish = epoch_end or t + 1 == end  # leave nothing in flight after this step
        period, delay = (1, 0) if blocking else (cycle.period, 0 if finish else cycle.delay)
        ages.append([])

        v = momentum * v + grads[t] if momentum else grads[t]  # 0 * inf would stay forever
        x = x - lr * v

        # What is posted is x before the merge of the same step, as Heat sends before it receives.
        new = None
        if (t - start + 1) % period == 0 or epoch_end:
            new, sound = posted(x, t, delay, blocking_wire if blocking else wire)
            left_out += ~sound
        if flight is not None and (t == flight.step + flight.delay or finish):
            ages[t].append(t - flight.step)
            x, flight = merged(x, flight, age=t - flight.step), None
        if new is not None and delay == 0:
            ages[t].append(0)
            x = merged(x, new, age=0)
        elif new is not None:
            flight = new

        history.append((x, period, delay, phase, flight is not None))
        # The loss of an epoch is the mean over its steps and over all nodes, so that all decide
        # alike. Only epochs that end in the cycling phase tell whether (B, S) have had their time.
        if losses is not None:
            heard.append(losses[t])
        if epoch_end:
            seen = np.asarray(heard)[np.isfinite(heard)]
            heard = []
            if phase == CYCLING and seen.size:
                cycle.epoch_loss(seen.mean())
    return Trajectory(*(np.array(column) for column in zip(*history, strict=True)), ages, left_out)
