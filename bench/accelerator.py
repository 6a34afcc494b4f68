"""Measures what exchanges cost a step whose computing leaves the host's core free.

    mpiexec -n 2 python bench/accelerator.py [--wires float32 bfloat16 int8]
        [--guards off skip] [--seconds 0.165] [--period 6] [--delay 5] [--heap default]

A step begins with a sleep. The core is then free, as it is while an accelerator computes. The
gradients are arrays in memory, as those of a backward pass are. What remains is what jdaso costs.
The parameters are 4.04 M float32 numbers in 60 leaves, the optimizer is SGD with momentum. A pair
is a run of two periods without exchanges and one with DASO, whose first exchange is in flight when
the run begins. The table has the median of the pairs' ratios on the slowest process and its range.
"Blocked" is the mean time for which an exchange blocks training.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import time

from machine import keep_memory, machine, own_core

# One core for each process, as on a node whose accelerator does the computing.
os.environ.setdefault("NPROC", "16")
own_core()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from pairs import header, row  # noqa: E402
from step import ReportTotals, apply_gradients, settle  # noqa: E402

import jdaso  # noqa: E402

SGD = optax.sgd(1e-2, momentum=0.9)


def prepare(tx, params, seconds):
    """Compiles a step. Returns a function that takes steps and returns the seconds of one."""
    state = [jax.tree.map(jnp.copy, params), tx.init(params)]
    grads = [1e-6 * x for x in params]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, grads):
        return apply_gradients(tx, grads, opt_state, params)

    def run(steps):
        start = time.perf_counter()
        for _ in range(steps):
            time.sleep(seconds)
            state[:] = jax.block_until_ready(step(*state, grads))
        return (time.perf_counter() - start) / steps

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=4.04, help="million parameters")
    parser.add_argument("--leaves", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.165, help="computing time of a step")
    parser.add_argument("--wires", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--guards", nargs="+", choices=("off", "skip"), default=["off", "skip"])
    parser.add_argument("--period", type=int, default=6)
    parser.add_argument("--delay", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs")
    parser.add_argument("--heap", choices=("kept", "default"), default="kept")
    arguments = parser.parse_args()
    if arguments.heap == "kept":
        keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm.Dup()
    say = print if topology.rank == 0 else lambda *_, **__: None
    size = round(arguments.millions * 1e6 / arguments.leaves)
    params = [jnp.full((size,), 1.0 + i) for i in range(arguments.leaves)]
    steps = 2 * arguments.period
    alone = prepare(SGD, params, arguments.seconds)
    alone(steps)  # compilation and first use of memory

    def pair(within, exchange, totals):
        """Seconds of a step without and with exchanges, on the slowest process."""
        settle(exchange)
        comm.Barrier()
        base = alone(steps)
        comm.Barrier()
        within(arguments.period)  # so that an exchange is in flight when the timed run begins
        with totals:
            both = base, within(steps)
        return tuple(map(max, zip(*comm.allgather(both), strict=True)))

    say(machine())
    say(
        f"{topology.num_nodes} processes, one core each; {arguments.millions:g} M parameters in "
        f"{arguments.leaves} leaves; period {arguments.period}, delay {arguments.delay}; "
        f"{arguments.pairs} pairs of {steps} steps; {arguments.heap} heap\n"
    )
    say(header("wire", "guard", "alone, ms", "with, ms", "ratio", "range", "blocked, ms"))
    schedule = jdaso.constant(arguments.period, arguments.delay)
    for wire, guard in itertools.product(arguments.wires, arguments.guards):
        exchange = jdaso.mpi_exchange(topology)
        averaging = jdaso.daso(exchange, schedule=schedule, wire=wire, nonfinite=guard)
        within = prepare(jdaso.chain(SGD, averaging), params, arguments.seconds)
        within(steps)
        totals = ReportTotals(exchange)
        found = [pair(within, exchange, totals) for _ in range(arguments.pairs)]
        ratios = [with_exchange / base for base, with_exchange in found]
        base, both = (1e3 * statistics.median(times) for times in zip(*found, strict=True))
        blocked = 1e3 * max(comm.allgather(totals.per_exchange("seconds_blocked")))
        cells = f"{base:.1f}", f"{both:.1f}", f"{statistics.median(ratios):.3f}"
        between = f"{min(ratios):.3f}..{max(ratios):.3f}"
        say(row(wire, guard, *cells, between, f"{blocked:.1f}"), flush=True)
        exchange.close()


if __name__ == "__main__":
    main()
