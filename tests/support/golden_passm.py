"""ASSM, PASSM and PASSM+ as NumPy recursions; no jax, no jdaso.

Written from passm Algorithm 1, Sec. 4 and Table 1. The order of the writes, which the paper leaves
to the system, is given here: processes take turns, or all read before the first one writes.
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
        x: The first parameters, of shape (n,).
        gradient: ``(x, process, step) -> gradient``.
        blocks: Indices of each process's block.
        rate: ``step -> gamma``.
        momentum: m.
        steps: Number of steps of each process.
        whole: Whether a step updates all of x, or the process's block.
        read_together: Whether all processes read before the first one writes. Otherwise each reads
            what the previous one has written.
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
    """PASSM+: whether a step updates all of x, and the factor of its learning rate."""

    def whole(k: int) -> bool:
        return sum(k >= s for s in switches) % 2 == 0

    def factor(k: int) -> float:
        to_passm = [s for s in switches[::2] if k >= s]
        return (1 - 1 / processes) ** len(to_passm)

    return whole, factor
