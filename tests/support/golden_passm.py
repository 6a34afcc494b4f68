"""ASSM, PASSM and PASSM+ as NumPy recursions; no jax, no jdaso.

Written from passm Algorithms 1 and 2, Assumption 2.1, Eq. 9, Sec. 4 and Table 1. What the paper
leaves to chance is given here: who writes which block at each iteration, and the delays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def train(
    x: np.ndarray,
    gradient: Callable[[np.ndarray, int, int], np.ndarray],
    iterations: Sequence[tuple[int, Sequence[int]]],
    rate: Callable[[int], float],
    momentum: float,
    delays: Callable[[int], int | np.ndarray] = lambda k: 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 2 with the momentum private to a core, as in Algorithm 1.

    Args:
        x: The first parameters, of shape (n,).
        gradient: ``(x, core, step of the core) -> gradient``.
        iterations: For each k, the core that writes, and the indices i_k of its block.
        rate: ``step of the core -> gamma``.
        momentum: m.
        delays: ``k -> d^k``, one for each component. Nothing is older than the first parameters.

    Returns:
        The versions of the shared parameters, of shape (iterations + 1, n), and what was read.
    """
    versions, reads, u, taken = [x.copy()], [], {}, {}
    for k, (c, block) in enumerate(iterations):
        d = np.broadcast_to(delays(k), x.shape)
        read = np.array([versions[max(k - d[j], 0)][j] for j in range(len(x))])
        step, i = taken.get(c, 0), np.asarray(block)
        own = u.setdefault(c, np.zeros(len(x)))
        own[i] = momentum * own[i] + gradient(read, c, step)[i]
        new = versions[-1].copy()
        new[i] -= (1 - momentum) * rate(step) * own[i]
        taken[c] = step + 1
        versions.append(new)
        reads.append(read)
    return np.array(versions), np.array(reads)


def weighted_mean(gradients: Sequence[np.ndarray], batch_sizes: Sequence[int]) -> np.ndarray:
    """Eq. 9 for a minibatch in parts: the mean over all its samples."""
    total = sum(size * g for size, g in zip(batch_sizes, gradients, strict=True))
    return total / sum(batch_sizes)


def plus(switches: Sequence[int], processes: int) -> tuple[Callable, Callable]:
    """PASSM+: whether a step updates all of x, and the factor of its learning rate."""

    def whole(k: int) -> bool:
        return sum(k >= s for s in switches) % 2 == 0

    def factor(k: int) -> float:
        to_passm = [s for s in switches[::2] if k >= s]
        return (1 - 1 / processes) ** len(to_passm)

    return whole, factor
