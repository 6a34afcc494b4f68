"""Training steps for measurements, and their times in pairs, without and with exchanges."""

from __future__ import annotations

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from machine import memcpy_seconds

import jdaso
from jdaso.core.transformation import Averaging

SGD = optax.sgd(1e-2, momentum=0.9)


def apply_gradients(tx, grads, opt_state, params, **extra_args):
    """:func:`jdaso.apply_gradients`. The baselines are optimizers of optax without an averaging."""
    if isinstance(tx, Averaging):
        return jdaso.apply_gradients(tx, grads, opt_state, params, **extra_args)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def make_step(tx, matmuls):
    """Compiles a training step: ``matmuls`` matrix products in place of a gradient, then ``tx``."""
    matrix = jnp.full((384, 384), 1 / 384)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, matrix):
        matrix = jax.lax.fori_loop(0, matmuls, lambda _, m: m @ matrix, matrix)
        # The gradient depends on the matmuls, so the update cannot run before they have ended.
        slope = 1e-6 + 0.0 * matrix[0, 0]
        grads = jax.tree.map(lambda p: slope * p, params)
        return *apply_gradients(tx, grads, opt_state, params), slope

    return lambda params, opt_state: step(params, opt_state, matrix)


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
    matrix = jnp.full((384, 384), 1 / 384)
    run = jax.jit(lambda m, n: jax.lax.fori_loop(0, n, lambda _, x: x @ m, m))
    run(matrix, 20).block_until_ready()
    start = time.perf_counter()
    run(matrix, 100).block_until_ready()
    return max(1, round(100 * seconds / (time.perf_counter() - start)))


# -------------------------------------------------------------- Steps whose gradients are arguments


def make_params(megabytes, leaves, mesh, specs):
    """Leaves of equal size. They take turns with the ``PartitionSpec`` of ``specs``.

    Returns:
        The parameters, and the sharding of each leaf.
    """
    shardings = [NamedSharding(mesh, specs[i % len(specs)]) for i in range(leaves)]
    rows = 64
    columns = max(1, round(megabytes * 250_000 / leaves / rows))
    columns += -columns % mesh.size
    params = [
        jax.device_put(np.full((rows, columns), 1.0 + i, np.float32), sharding)
        for i, sharding in enumerate(shardings)
    ]
    return params, shardings


def held_bytes(params) -> int:
    """Bytes of the parameters on all devices of this process."""
    return sum(shard.data.nbytes for x in params for shard in x.addressable_shards)


def device_bytes(params) -> int:
    """Bytes of the parameters on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in params)


def copy_seconds(params) -> float:
    """The median time of a copy of the parameters, on one core or on an accelerator."""
    if next(iter(params[0].devices())).platform == "cpu":
        return memcpy_seconds(held_bytes(params) / 1e6)
    copy, times = jax.jit(lambda xs: [jnp.copy(x) for x in xs]), []
    jax.block_until_ready(copy(params))
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(10):
            copies = copy(params)
        jax.block_until_ready(copies)
        times.append((time.perf_counter() - start) / 10)
    return statistics.median(times)


class Training:
    """A compiled step and its state.

    Args:
        wrap: is applied to the step before it is compiled. It gets the state as well.
        options: of the compiler.

    Attributes:
        temporary: bytes of temporary memory, on one device.
        peak: bytes of all memory of the step, on one device.
        compile_seconds: of tracing and compiling.
        text: the compiled program.
    """

    def __init__(
        self, tx, params, chain_form=False, wrap=lambda step, opt_state: step, options=None
    ):
        self._tx, self._chain_form = tx, chain_form
        self._state = [jax.tree.map(jnp.copy, params), tx.init(params)]
        self._grads = [1e-6 * x for x in params]
        start = time.perf_counter()
        step = jax.jit(wrap(self._step, self._state[1]), donate_argnums=(0, 1))
        lowered = step.lower(*self._state, self._grads)
        self._compiled = lowered.compile(compiler_options=options)
        self.compile_seconds = time.perf_counter() - start
        self._state[1] = jax.device_put(self._state[1], self._compiled.input_shardings[0][1])
        memory = self._compiled.memory_analysis()
        self.temporary, self.peak = memory.temp_size_in_bytes, memory.peak_memory_in_bytes

    @property
    def text(self) -> str:
        return self._compiled.as_text()

    def _step(self, params, opt_state, grads):
        if self._chain_form:
            updates, opt_state = self._tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state
        return apply_gradients(self._tx, grads, opt_state, params)

    def dispatch(self):
        """Takes a step, and does not wait for it."""
        self._state[:] = self._compiled(*self._state, self._grads)

    def step(self) -> float:
        """Takes a step, and returns its seconds."""
        start = time.perf_counter()
        self.dispatch()
        jax.block_until_ready(self._state)
        return time.perf_counter() - start

    def posted(self) -> int:
        """The number of exchanges."""
        return int(jdaso.metrics(self._state[1]).exchanges)

    def merged(self) -> bool:
        """Whether the last step has merged an exchange."""
        return bool(jdaso.metrics(self._state[1]).merged)
