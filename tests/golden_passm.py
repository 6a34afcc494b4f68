"""ASSM, PASSM and PASSM+ as NumPy recursions; no jax, no jdaso.

Written from passm Algorithm 1, Sec. 4 and Table 1. What the system decides in the paper, who writes
when, is given here: processes take turns, or all of them read before the first one writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def train(
    x: np.ndarray,
    gradient: Callable[[np.ndarray, int, int], np.ndarray],
    blocks: Sequence[Sequence[int]],
    rate: Callable[[int], float],
    momentum: float,
    steps: int,
    whole: Callable[[int], bool],
    read_together: bool = False,
) -> np.ndarray:
    """The shared parameters after each step of all processes, of shape (steps, n).

    Args:
        x: where they begin.
        gradient: ``(x, process, step)``.
        blocks: indices of each process's block.
        rate: gamma of a process's step.
        momentum: m.
        steps: of each process.
        whole: whether a step updates all of x; else the process's block.
        read_together: all read, then all write, one after the other; else each reads what the one
            before it has written.
    """
    x, u, seen = x.copy(), np.zeros((len(blocks), len(x))), []
    for k in range(steps):
        common = x.copy()
        for c, block in enumerate(blocks):
            i = np.arange(len(x)) if whole(k) else np.asarray(block)
            g = gradient(common if read_together else x, c, k)
            u[c, i] = momentum * u[c, i] + g[i]
            x[i] -= (1 - momentum) * rate(k) * u[c, i]
        seen.append(x.copy())
    return np.array(seen)


def plus(switches: Sequence[int], processes: int) -> tuple[Callable, Callable]:
    """PASSM+: whether a step updates all of x, and what its learning rate is multiplied by."""

    def whole(k: int) -> bool:
        return sum(k >= s for s in switches) % 2 == 0

    def factor(k: int) -> float:
        to_passm = [s for s in switches[::2] if k >= s]
        return (1 - 1 / processes) ** len(to_passm)

    return whole, factor
