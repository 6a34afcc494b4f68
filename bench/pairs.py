"""Pairs of training steps, without and with jdaso. The gradients are arguments of the steps."""

from __future__ import annotations

import collections
import os
import re
import statistics
import time

# A process of a measurement has one core. Call own_core before a function of this module.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from machine import memcpy_seconds
from step import apply_gradients

import jdaso

SGD = optax.sgd(1e-2, momentum=0.9)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
LONGEST_WAIT = 0.5  # seconds until a transfer has ended
WARM_UP = 12  # pairs; the first steps touch new memory
ABOUT = "diloco without a warm-up"


def cases(exchange):
    """By name, averagings that post at every fourth step and merge at the next one.

    Fragments are posted at every third step. Local SGD merges at the step that posts.
    """
    schedule = jdaso.constant(4, 1)
    one_by_one = jdaso.constant(12, 1)
    found = {}
    for suffix, guard in ((", guard off", "off"), ("", "skip")):
        options = {"nonfinite": guard}
        found |= {
            f"daso{suffix}": jdaso.daso(exchange, schedule=schedule, **options),
            f"dasgd{suffix}": jdaso.dasgd(exchange, 4, 1, **options),
            f"local_sgd{suffix}": jdaso.local_sgd(exchange, 4, **options),
            f"easgd{suffix}": jdaso.easgd(exchange, alpha=0.1, schedule=schedule, **options),
            f"diloco{suffix}": jdaso.diloco(exchange, 4, OUTER, 1, **options),
        }
    return found | {
        "daso, bfloat16": jdaso.daso(exchange, schedule=schedule, wire="bfloat16"),
        "daso, int8": jdaso.daso(exchange, schedule=schedule, wire="int8"),
        "daso, float4": jdaso.daso(exchange, schedule=schedule, wire="float4"),
        "daso, 4 fragments": jdaso.daso(exchange, schedule=one_by_one, fragments=4),
    }


CASES = tuple(cases(jdaso.axis_exchange("node", 2)))


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


def measure(exchange, plain, trained, pairs, turn=None):
    """Seconds that steps take more than plain ones.

    Nothing is transferred during a step. The time for which a step waits for an exchange does not
    count, except for Local SGD, which always waits.

    Args:
        turn: nodes take their steps one after the other. It is the number of this node. None if
            all nodes take them at the same time.

    Returns:
        Kind of step -> the difference of each pair. The kinds are "none", "post", "merge" and
        "postmerge".
    """
    extra = collections.defaultdict(list)
    for i in range(WARM_UP + pairs):
        first, second = (plain, trained) if i % 2 else (trained, plain)
        posted = trained.posted()
        for at in range(1 if turn is None else exchange.num_nodes):
            if turn in (None, at):
                times = {first: first.step(), second: second.step()}
            exchange.any_node(False)  # waits for the other nodes
        posts = trained.posted() > posted
        if posts:
            time.sleep(min(2 * _transfer_seconds(exchange), LONGEST_WAIT))
            exchange.any_node(False)
        if i >= WARM_UP:
            kind = "post" * posts + "merge" * trained.merged() or "none"
            waited = _waited_seconds(exchange) if kind == "merge" else 0
            extra[kind].append(times[trained] - times[plain] - waited)
    return extra


def _transfer_seconds(exchange) -> float:
    """The median of the last transfers."""
    records = exchange.history()[-5:]
    spans = [record.transfer[1] - record.transfer[0] for record in records]
    return statistics.median(spans) if spans else LONGEST_WAIT


def _waited_seconds(exchange) -> float:
    """The time for which the last merge has waited for its exchange."""
    records = exchange.history()[-1:]
    return sum(record.wait[1] - record.wait[0] for record in records)


def in_copies(extra, copy) -> list[str]:
    """Cells of a table: the median and the quartiles of steps with nothing due, and two medians."""

    def median(kind):
        return f"{statistics.median(extra[kind]) / copy:.1f}" if extra[kind] else "-"

    quartiles = "-"
    if len(extra["none"]) > 1:
        low, _, high = statistics.quantiles(extra["none"], n=4)
        quartiles = f"{low / copy:.1f}..{high / copy:.1f}"
    return [median("none"), quartiles, median("post"), median("merge")]


def all_gathers(text) -> int:
    """The number of all-gathers and all-to-alls in a compiled program."""
    return len(re.findall(r" all-(?:gather|to-all)(?:-start)?\(", text))


def host_callbacks(text) -> int:
    """The number of Python callbacks in a compiled program."""
    return len(re.findall(r'custom_call_target="[^"]*callback', text))
