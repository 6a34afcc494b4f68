"""Measures what jdaso adds to a training step: time, and temporary device memory.

    mpiexec -n 2 python bench/tax.py [--leaves 40] [--megabytes 16] [--devices 1] [--sharded]
                                     [--default-heap] [--chain] [--only NAME]

Each process trains on one core by SGD with momentum. The gradients are arguments of the step, so
the baseline is the optimizer alone. Steps at which nothing is due, steps that post an exchange and
steps that merge one are measured separately. Nothing else happens on the network meanwhile. A pair
is a step without and a step with jdaso. The script prints the median of the pairs' differences in
units of the time that copying the parameters takes, and temporary memory of the compiled step in
units of the size of the parameters.
"""

from __future__ import annotations

import argparse
import collections
import os
import statistics
import time

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from machine import keep_memory, machine, memcpy_seconds, own_core
from step import apply_gradients

import jdaso

PERIOD, DELAY = 8, 2
SGD = optax.sgd(1e-2, momentum=0.9)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def cases(exchange):
    """By name, optimizers that post every eighth step and merge two steps later."""
    schedule = jdaso.constant(PERIOD, DELAY)
    return {
        "daso, guard off": jdaso.daso(exchange, schedule, nonfinite="off"),
        "daso": jdaso.daso(exchange, schedule),
        "daso, bfloat16": jdaso.daso(exchange, schedule, wire="bfloat16"),
        "daso, int8": jdaso.daso(exchange, schedule, wire="int8"),
        "daso, 4 fragments": jdaso.daso(exchange, schedule, fragments=4),
        "dasgd": jdaso.dasgd(exchange, PERIOD, DELAY),
        "easgd": jdaso.easgd(exchange, alpha=0.1, schedule=schedule),
        "diloco": jdaso.diloco(exchange, PERIOD, OUTER, DELAY),
    }


def make_params(arguments, mesh):
    """Leaves of equal size, replicated or sharded along one of their axes."""
    rows = 64
    columns = max(1, round(arguments.megabytes * 250_000 / arguments.leaves / rows))
    specs = [P(), P("local"), P(None, "local")] if arguments.sharded else [P()]
    specs = [specs[i % len(specs)] for i in range(arguments.leaves)]
    columns += -columns % mesh.size
    leaves = [np.full((rows, columns), 1.0 + i, np.float32) for i in range(arguments.leaves)]
    placed = [
        jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(leaves, specs, strict=True)
    ]
    return placed, specs


class Training:
    """A compiled step and its state.

    Attributes:
        temporary: bytes of temporary memory, on one device.
    """

    def __init__(self, tx, params, chain_form):
        self._tx, self._chain_form = tx, chain_form
        self._state = [jax.tree.map(jnp.copy, params), tx.init(params)]
        self._grads = [1e-6 * x for x in params]
        step = jax.jit(self._step, donate_argnums=(0, 1))
        self._compiled = step.lower(*self._state, self._grads).compile()
        self._state[1] = jax.device_put(self._state[1], self._compiled.input_shardings[0][1])
        self.temporary = self._compiled.memory_analysis().temp_size_in_bytes

    def _step(self, params, opt_state, grads):
        if self._chain_form:
            updates, opt_state = self._tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state
        return apply_gradients(self._tx, grads, opt_state, params)

    def step(self):
        """Takes a step, and returns its seconds."""
        start = time.perf_counter()
        self._state[:] = self._compiled(*self._state, self._grads)
        jax.block_until_ready(self._state)
        return time.perf_counter() - start

    def posted(self):
        """The number of exchanges."""
        return int(jdaso.metrics(self._state[1]).exchanges)

    def merged(self):
        """Whether the last step has merged an exchange."""
        return bool(jdaso.metrics(self._state[1]).merged)


def settle(exchange):
    """Waits until no exchange is being transferred."""
    if exchange.num_nodes > 1:
        time.sleep(0.05)
    exchange.anyone(False)


def measure(exchange, plain, trained, periods):
    """Seconds that each kind of step takes more than a plain one."""
    extra = collections.defaultdict(list)
    for _ in range(2 * PERIOD):  # the first steps touch new memory
        trained.step(), plain.step(), settle(exchange)
    for i in range(periods * PERIOD):
        first, second = (plain, trained) if i % 2 else (trained, plain)
        posted = trained.posted()
        times = {first: first.step(), second: second.step()}
        kind = "post" * (trained.posted() > posted) + "merge" * trained.merged() or "none"
        extra[kind].append(times[trained] - times[plain])
        settle(exchange)
    return {kind: statistics.median(seconds) for kind, seconds in extra.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=16, help="size of the parameters")
    parser.add_argument("--leaves", type=int, default=40, help="number of leaves")
    parser.add_argument("--devices", type=int, default=1, help="virtual devices of a node")
    parser.add_argument("--sharded", action="store_true", help="shard two leaves of three")
    parser.add_argument("--default-heap", action="store_true", help="give freed memory back")
    parser.add_argument("--chain", action="store_true", help="tx.update and optax.apply_updates")
    parser.add_argument("--periods", type=int, default=12, help="periods to measure")
    parser.add_argument("--only", help="measure only this case")
    arguments = parser.parse_args()
    own_core()
    if not arguments.default_heap:
        keep_memory()
    if arguments.devices > 1:
        jdaso.cluster.use_virtual_devices(arguments.devices)
    topology = jdaso.discover_topology()
    params, specs = make_params(arguments, topology.mesh)
    nbytes = sum(x.nbytes for x in params)
    on_device = sum(x.addressable_shards[0].data.nbytes for x in params)
    exchange = jdaso.mpi_exchange(topology, shardings=specs)
    copy = memcpy_seconds(nbytes / 1e6)
    say = print if topology.rank == 0 else lambda *text, **options: None
    say(machine())
    say(
        f"{nbytes / 1e6:.0f} MB in {arguments.leaves} leaves, {arguments.devices} devices, "
        f"{'sharded' if arguments.sharded else 'replicated'}, "
        f"{'default' if arguments.default_heap else 'kept'} heap, "
        f"{'chain' if arguments.chain else 'apply_gradients'}; a copy takes {1e3 * copy:.2f} ms"
    )
    say(f"{'copies':20}{'none due':>10}{'post':>10}{'merge':>10}{'temporary':>12}{'compile':>10}")
    plain = Training(SGD, params, chain_form=False)
    for name in cases(exchange):
        if arguments.only not in (None, name):
            continue
        exchange = jdaso.mpi_exchange(topology, shardings=specs)
        start = time.perf_counter()
        trained = Training(jdaso.chain(SGD, cases(exchange)[name]), params, arguments.chain)
        compiled = time.perf_counter() - start
        extra = measure(exchange, plain, trained, arguments.periods)
        columns = "".join(
            f"{extra[kind] / copy:10.1f}" if kind in extra else f"{'-':>10}"
            for kind in ("none", "post", "merge")
        )
        say(f"{name:20}{columns}{trained.temporary / on_device:12.2f}{compiled:9.1f}s", flush=True)
        exchange.close()


if __name__ == "__main__":
    main()
