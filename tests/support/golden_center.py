"""Asynchronous methods as NumPy recursions over the turns of workers.

Written from easgd.txt (Algorithms 1 to 5, Sec. 4 and 5), not from the library: no jax, no jdaso.
``order`` says whose turn it is; a turn is one optimizer step. ``gradient(turn, x)`` is that of the
turn's minibatch. The exchange before a worker's very first step is left out, as the library's is,
where a worker starts from the center as it is. With a delay, which the papers do not have, a worker
gets a reply so many of its own steps later: EASGD's force as it was computed from what was sent,
DOWNPOUR's center plus what the worker has added since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Gradient = Callable[[int, np.ndarray], np.ndarray]


class Trajectory(NamedTuple):
    """Center and its average after every turn, (T, n); workers' x in the end, (p, n)."""

    centers: np.ndarray
    averages: np.ndarray
    params: np.ndarray


def eamsgd(
    start: np.ndarray,
    gradient: Gradient,
    order: Sequence[int],
    period: int,
    alpha: float,
    lr: float,
    momentum: float = 0.0,
    delay: int = 0,
) -> Trajectory:
    """Algorithm 2; with momentum 0 it is Algorithm 1. ``params`` are the workers' x."""
    workers = max(order) + 1
    x = np.stack([start] * workers)
    v, t, c = np.zeros_like(x), [0] * workers, start.copy()
    force: list[tuple[int, np.ndarray] | None] = [None] * workers
    centers = []
    for turn, i in enumerate(order):
        g = gradient(turn, x[i] + momentum * v[i])
        arrived, posted = np.zeros_like(c), force[i]
        if posted is not None and t[i] == posted[0] + delay:
            arrived, force[i] = posted[1], None
        if t[i] > 0 and t[i] % period == 0:
            sent = x[i] - arrived
            pull = alpha * (sent - c)
            c = c + pull
            if delay == 0:
                arrived = arrived + pull
            else:
                force[i] = t[i], pull
        v[i] = momentum * v[i] - lr * g
        x[i] = x[i] + v[i] - arrived
        t[i] += 1
        centers.append(c)
    return Trajectory(np.array(centers), np.array(centers), x)


def downpour(
    start: np.ndarray,
    gradient: Gradient,
    order: Sequence[int],
    period: int,
    lr: float,
    delay: int = 0,
    rate: Callable[[int], float] = lambda t: 1 / (t + 1),
) -> Trajectory:
    """Algorithm 3 and the averages of Sec. 5; ``rate(t)`` is a, t the master's clock."""
    workers = max(order) + 1
    x = np.stack([start] * workers)
    v, t = np.zeros_like(x), [0] * workers
    c, z, clock = start.copy(), start.copy(), 0
    reply: list[tuple[int, np.ndarray] | None] = [None] * workers
    centers, averages = [], []
    for turn, i in enumerate(order):
        step = -lr * gradient(turn, x[i])
        x[i], v[i] = x[i] + step, v[i] + step
        posted = reply[i]
        if posted is not None and t[i] == posted[0] + delay:
            x[i], reply[i] = posted[1] + v[i], None
        if (t[i] + 1) % period == 0:
            z, clock = (1 - rate(clock)) * z + rate(clock) * c, clock + 1
            c = c + v[i]
            v[i] = 0
            if delay == 0:
                x[i] = c
            else:
                reply[i] = t[i], c
        t[i] += 1
        centers.append(c)
        averages.append(z)
    return Trajectory(np.array(centers), np.array(averages), x)


def mdownpour(
    start: np.ndarray, gradient: Gradient, order: Sequence[int], lr: float, momentum: float
) -> Trajectory:
    """Algorithms 4 and 5."""
    x = np.stack([start] * (max(order) + 1))
    v, c, centers = np.zeros_like(start), start.copy(), []
    for turn, i in enumerate(order):
        v = momentum * v - lr * gradient(turn, x[i])
        c = c + momentum * v
        x[i] = c
        centers.append(c)
    return Trajectory(np.array(centers), np.array(centers), x)


def easgd_map(workers: int, worker: int, eta: float, alpha: float) -> np.ndarray:
    """F^i of Sec. 4 for F(x) = x^2/2 on the state (x^1 .. x^p, c)."""
    turn = np.eye(workers + 1)
    turn[worker, worker] = 1 - eta - alpha
    turn[worker, workers] = turn[workers, worker] = alpha
    turn[workers, workers] = 1 - alpha
    return turn


def admm_map(workers: int, worker: int, eta: float, rho: float) -> np.ndarray:
    """F_3^i F_2^i F_1^i of Sec. 4 on the state (lambda^1, x^1, .., lambda^p, x^p, c).

    From Eq. 9 to 11; the matrix that is printed for F_2 has 1 - eta rho where Eq. 10 gives 1 - eta.
    """
    size = 2 * workers + 1
    multiplier, x, center = 2 * worker, 2 * worker + 1, size - 1
    first, second, third = np.eye(size), np.eye(size), np.eye(size)
    first[multiplier, x], first[multiplier, center] = -1, 1
    second[x, multiplier] = second[x, center] = eta * rho / (1 + eta * rho)
    second[x, x] = (1 - eta) / (1 + eta * rho)
    third[center] = 0
    third[center, 0 : size - 1 : 2], third[center, 1 : size - 1 : 2] = -1 / workers, 1 / workers
    return third @ second @ first


def composed(turn: Callable[..., np.ndarray], workers: int, *numbers: float) -> np.ndarray:
    """The map of one round, F^p .. F^2 F^1."""
    product = turn(workers, 0, *numbers)
    for worker in range(1, workers):
        product = turn(workers, worker, *numbers) @ product
    return product


def radius(matrix: np.ndarray) -> float:
    """The largest absolute eigenvalue."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())
