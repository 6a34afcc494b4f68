"""A training step for measurements, with matrix products in place of a gradient."""

from __future__ import annotations

import functools
import statistics
import time

import jax
import optax

import jdaso
from jdaso.core.transformation import Averaging


def apply_gradients(tx, grads, opt_state, params, **extra_args):
    """:func:`jdaso.apply_gradients`. The baselines are optimizers of optax without an averaging."""
    if isinstance(tx, Averaging):
        return jdaso.apply_gradients(tx, grads, opt_state, params, **extra_args)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def make_step(tx, matmuls):
    """Compiles a training step: ``matmuls`` matrix products in place of a gradient, then ``tx``."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, matrix):
        matrix = jax.lax.fori_loop(0, matmuls, lambda _, m: m @ matrix, matrix)
        # The gradient depends on the matmuls, so the update cannot run before they have ended.
        slope = 1e-6 + 0.0 * matrix[0, 0]
        grads = jax.tree.map(lambda p: slope * p, params)
        return *apply_gradients(tx, grads, opt_state, params), slope

    return step


def timed(step, state, *inputs):
    """Returns a function that takes a number of steps and returns the seconds of one step.

    What a step returns besides the state is dropped.
    """

    def run(steps):
        start = time.perf_counter()
        for _ in range(steps):
            state[:] = step(*state, *inputs)[: len(state)]
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / steps

    return run


class ReportTotals:
    """Sums what an exchange reports about the periods inside ``with totals:``."""

    def __init__(self, exchange):
        self._exchange = exchange
        self._total = dict.fromkeys(exchange.report(), 0.0)

    def __enter__(self):
        self._before = self._exchange.report()

    def __exit__(self, *error):
        after = self._exchange.report()
        for name, value in after.items():
            self._total[name] += value - self._before[name]

    def per_exchange(self, name):
        """The mean over the completed exchanges, 0 if there are none."""
        return self._total[name] / max(self._total["exchanges"], 1)

    def __getitem__(self, name):
        return self._total[name]


def settle(exchange):
    """Waits until the last exchange has been transferred, so that nothing runs beside."""
    last = exchange.history()[-1:]
    time.sleep(sum(1.5 * (end - start) for start, end in (record.transfer for record in last)))


def pair(comm, exchange, totals, alone, within, steps, first):
    """Seconds of a step without and with exchanges, on the slowest process.

    Args:
        totals: the :class:`ReportTotals` of the steps with exchanges.
        alone, within: take a number of steps and return the seconds of one.
        first: the number of steps before the timed ones, so that an exchange is in flight when
            those with exchanges begin.
    """
    settle(exchange)
    comm.Barrier()
    alone(first)
    base = alone(steps)
    comm.Barrier()
    within(first)
    with totals:
        both = base, within(steps)
    return tuple(map(max, zip(*comm.allgather(both), strict=True)))


def ratio_cells(pairs):
    """Cells of a table: the median of the ratios to the first ones, and their range."""
    ratios = [second / first for first, second in pairs]
    return f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}..{max(ratios):.3f}"


def matmuls_for(seconds: float) -> int:
    """The number of 384 x 384 matrix products that take about ``seconds``."""
    matrix = jax.numpy.full((384, 384), 1 / 384)
    run = jax.jit(lambda m, n: jax.lax.fori_loop(0, n, lambda _, x: x @ m, m))
    run(matrix, 20).block_until_ready()
    start = time.perf_counter()
    run(matrix, 100).block_until_ready()
    return max(1, round(100 * seconds / (time.perf_counter() - start)))
