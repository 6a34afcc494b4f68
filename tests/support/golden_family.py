"""The relatives of DASO as NumPy recursions over all nodes at once; no jax, no jdaso.

Written from the papers: dasgd Eq. 2, easgd Eq. 5 to 7 with Algorithms 1 and 2, DiLoCo Algorithm 1,
Streaming DiLoCo Sec. 2.2. Where gradients do not depend on the parameters, what the local
optimizer makes of them is given: its updates u, so that x' = x + u.

The papers do not know nodes that fail. Here a node whose update is not finite skips that step and
is lost, its numbers nan: it contributes to no mean until it has taken one in their place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import golden
import numpy as np


class Run(NamedTuple):
    """A run of T steps of P nodes, each entry as it is after the step.

    ``params`` is (T, P, n); ``common`` (T, n), what all nodes agree on: the last mean, the anchor,
    the center; ``left_out`` (P,), how often a node could not contribute to a mean.
    """

    params: np.ndarray
    common: np.ndarray
    left_out: np.ndarray


def sgd(grads: np.ndarray, lr: float, momentum: float = 0.0) -> np.ndarray:
    """Updates of gradients that are known beforehand: ``v <- m v + g``, ``u = -lr v``."""
    updates, v = [], np.zeros_like(grads[0])
    for g in grads:
        v = momentum * v + g if momentum else g  # 0 * inf would stay forever
        updates.append(-lr * v)
    return np.array(updates)


def is_sound(x: np.ndarray) -> np.ndarray:
    """(P,) of the rows of (P, n): which nodes have their numbers."""
    return np.isfinite(x).all(axis=1)


def recovered(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """x, where those who are lost have taken the mean."""
    return np.where(is_sound(x)[:, None], x, mean)


def stepped(x: np.ndarray, update: np.ndarray) -> np.ndarray:
    """x', nan for the nodes that are lost in this step."""
    return np.where(is_sound(update)[:, None], x + update, np.nan)


def allreduce(grads: np.ndarray, wire: str | None = None) -> np.ndarray:
    """(T, P, n): in each step, the mean gradient of the nodes that have one, for each node."""
    means = []
    for step, g in enumerate(grads):
        post, _ = golden.posted(g, step, 0, wire)
        means.append(np.broadcast_to(post.total / post.members, g.shape))
    return np.array(means)


def late_means(
    x: np.ndarray,
    updates: np.ndarray,
    period: int,
    delay: int,
    turn: int,
    merge: Callable[[np.ndarray, np.ndarray, Any], tuple[np.ndarray, tuple]],
    state: tuple,
) -> Run:
    """Means of x', taken after the steps k with (k + 1) mod period = turn, arrive delay steps late.

    With delay = period, a mean is of x' from before the arrival of the last one (dasgd Eq. 7).

    Args:
        x: (P, n), where the nodes start.
        updates: (T, P, n).
        period: tau of DaSGD, H of DiLoCo.
        delay: d of DaSGD.
        turn: 0, or that of a fragment.
        merge: ``(x', mean, state) -> (x, state)``.
        state: what ``merge`` keeps; the first entry is what all nodes agree on.
    """
    means, params, common, left_out = {}, [], [], np.zeros(len(x), int)

    def take_mean(k: int) -> None:
        post, sound = golden.posted(x, k, delay, wire=None)
        means[k] = post.total / post.members
        left_out[~sound] += 1

    for k, update in enumerate(updates):
        x = stepped(x, update)
        if (k + 1) % period == turn:
            take_mean(k)
        if k - delay in means:  # (k + 1 - d) mod tau = 0
            mean = means.pop(k - delay)
            x, state = merge(recovered(x, mean), mean, state)
        params.append(x)
        common.append(state[0])
    return Run(np.array(params), np.array(common), left_out)


def dasgd(
    x: np.ndarray, updates: np.ndarray, period: int, delay: int, xi: float, turn: int = 0
) -> Run:
    """dasgd Eq. 2: ``x <- xi x' + (1 - xi) mean x'(k-d)``; Local SGD is xi = 0, delay = 0."""

    def merge(x, mean, state):
        return xi * x + (1 - xi) * mean, (mean,)

    return late_means(x, updates, period, delay, turn, merge, (x[0],))


def delta(
    x: np.ndarray,
    updates: np.ndarray,
    period: int,
    delay: int,
    turn: int = 0,
    weight: Callable[[int, int], float] = lambda members, age: 1.0,
) -> Run:
    """Local SGD with corrections, ``x <- x' + b (mean x'(k-d) - x'(k-d))``.

    b = 1 is hivemind's delta rule, b = P / (2 S + P) has DASO's weight of a sum's age, and
    b = 1 - xi that of DaSGD.

    Where a post and a merge fall on one step, the merge comes first: what it adds is missing from
    the parameters, and would otherwise be added once more by the merge of what is posted.
    A node that has posted nothing takes the mean. One that is lost later has skipped its steps
    since, and adds the mean's change to what it has.
    """
    posted, params, common, left_out = {}, [], [], np.zeros(len(x), int)
    out, mean = np.zeros(len(x), bool), x[0]  # nodes that have skipped a step since a merge

    def merge(k: int) -> None:
        nonlocal x, out, mean
        own, contributed, mean = posted.pop(k)
        b = weight(int(contributed.sum()), delay)
        x = np.where(contributed[:, None], x + b * (mean - own), mean)
        out = np.zeros(len(x), bool)

    def post(k: int) -> None:
        contributed = ~out
        left_out[out] += 1
        posted[k] = x, contributed, x[contributed].mean(axis=0)

    for k, update in enumerate(updates):
        sound = is_sound(update)
        out |= ~sound
        x = x + np.where(sound[:, None], update, 0)
        if delay and k - delay in posted:
            merge(k - delay)
        if (k + 1) % period == turn:
            post(k)
        if delay == 0 and k in posted:
            merge(k)
        params.append(x)
        common.append(mean)
    return Run(np.array(params), np.array(common), left_out)


def diloco(
    x: np.ndarray,
    updates: np.ndarray,
    period: int,
    lr: float,
    momentum: float,
    delay: int = 0,
    mix: float = 0.0,
    turn: int = 0,
    warmup: int = 0,
) -> Run:
    """DiLoCo with Nesterov SGD outside, ``m <- mu m + g``, ``a <- a - lr (g + mu m)``.

    The outer gradient is ``g = a - mean x'``, and then ``x <- mix x' + (1 - mix) a``. In the first
    ``warmup`` rounds ``a <- mean x'``, and m stays 0.
    """

    def merge(x, mean, state):
        a, m, rounds = state
        g = a - mean
        if rounds < warmup:
            a = mean
        else:
            m = momentum * m + g
            a = a - lr * (g + momentum * m)
        return mix * x + (1 - mix) * a, (a, m, rounds + 1)

    return late_means(x, updates, period, delay, turn, merge, (x[0], np.zeros_like(x[0]), 0))


def in_fragments(
    recursion: Callable[..., Run],
    x: np.ndarray,
    updates: np.ndarray,
    period: int,
    fragments: int,
    **arguments: Any,
) -> Run:
    """A recursion of each fragment by itself, their turns spread evenly over a period.

    Fragments are equally many columns. All of a node's columns are lost together.
    """
    parts = zip(np.split(x, fragments, -1), np.split(updates, fragments, -1), strict=True)
    runs = [
        recursion(part, moves, period, turn=i * period // fragments, **arguments)
        for i, (part, moves) in enumerate(parts)
    ]
    params, common, left_out = zip(*runs, strict=True)
    return Run(np.concatenate(params, -1), np.concatenate(common, -1), sum(left_out))


def easgd(x: np.ndarray, updates: np.ndarray, period: int, alpha: float, delay: int = 0) -> Run:
    """easgd Eq. 5 and 6: old x and c on both right sides, and the new c at once.

    The delay is only for nodes that are lost: they find the mean of a communication step that
    many steps later. One that fails in a communication step is lost before it communicates.
    """
    c, means, params, centers, left_out = x[0], {}, [], [], np.zeros(len(x), int)
    for t, update in enumerate(updates):
        sound = is_sound(update)[:, None]
        x = np.where(sound, x, np.nan)
        due = t > 0 and t % period == 0  # Algorithm 1; at t = 0 every x equals c
        if due:
            post, contributed = golden.posted(x, t, delay, wire=None)
            left_out += ~contributed
        if delay > 0 and t - delay in means:
            x = recovered(x, means.pop(t - delay))
        if due:
            beta, means[t] = post.members * alpha, post.total / post.members
            x = np.where(contributed[:, None], x - alpha * (x - c), x)
            c = (1 - beta) * c + beta * means[t]
        if delay == 0 and t in means:
            x = recovered(x, means.pop(t))
        x = x + np.where(sound, update, 0)
        params.append(x)
        centers.append(c)
    return Run(np.array(params), np.array(centers), left_out)


def eamsgd(
    x: np.ndarray,
    gradient: Callable[[int, np.ndarray], np.ndarray],
    steps: int,
    period: int,
    alpha: float,
    lr: float,
    momentum: float,
) -> Run:
    """easgd Algorithm 2, all nodes at once: the gradient at x + delta v, the pull on x.

    Args:
        x: (P, n), where the nodes start, all equal.
        gradient: ``(t, point) -> (P, n)``, gradients at a point of each node.
        steps: T.
        period: tau.
        alpha: moving rate.
        lr: eta.
        momentum: delta.
    """
    c, v, params, centers = x[0], np.zeros_like(x), [], []
    for t in range(steps):
        old = x
        if t > 0 and t % period == 0:
            x, c = x - alpha * (old - c), c + alpha * (old - c).sum(axis=0)
        v = momentum * v - lr * gradient(t, old + momentum * v)
        x = x + v
        params.append(x)
        centers.append(c)
    return Run(np.array(params), np.array(centers), np.zeros(len(x), int))
