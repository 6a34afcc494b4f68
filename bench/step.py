"""A training step for measurements: products of matrices that stand for a gradient."""

from __future__ import annotations

import functools
import time

import jax
import optax


def make_step(tx, matmuls):
    """A jitted training step: matmuls that stand for the gradient, then the optimizer."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, matrix):
        matrix = jax.lax.fori_loop(0, matmuls, lambda _, m: m @ matrix, matrix)
        # The gradient depends on the matmuls, so the update cannot run before they have ended.
        slope = 1e-6 + 0.0 * matrix[0, 0]
        grads = jax.tree.map(lambda p: slope * p, params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, slope

    return step


class Seen:
    """What an exchange reports of the times inside ``with seen:``."""

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
        """The mean over the exchanges that came back; 0 without any."""
        return self._total[name] / max(self._total["exchanges"], 1)

    def __getitem__(self, name):
        return self._total[name]


def settle(exchange):
    """Waits until what is in flight has landed, so that nothing of it runs beside what follows."""
    last = exchange.history()[-1:]
    time.sleep(sum(1.5 * (end - start) for start, end in (flown.flight for flown in last)))


def matmuls_for(seconds: float) -> int:
    """How many products of matrices 384 x 384 take about so long; stand for a gradient."""
    matrix = jax.numpy.full((384, 384), 1 / 384)
    run = jax.jit(lambda m, n: jax.lax.fori_loop(0, n, lambda _, x: x @ m, m))
    run(matrix, 20).block_until_ready()
    start = time.perf_counter()
    run(matrix, 100).block_until_ready()
    return max(1, round(100 * seconds / (time.perf_counter() - start)))
