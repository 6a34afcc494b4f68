"""Measures what an exchange in flight costs a training step, in paired runs.

    mpiexec -n 2 python bench/overlap.py [--megabytes 100] [--seconds 1] [--pairs 7]

Every process takes steps of a model whose parameters have the given size. A step computes for
about the given time on one core and updates all parameters by SGD. "alone" does nothing else. The
other rows add exchanges. EASGD computes the same numbers with a delay of one period and with
blocking exchanges. Each pair runs the same number of steps alone and with exchanges. The script
prints the median of the pairs' ratios with its range, and the mean time for which an exchange
blocks training on the slowest node. A run alone begins after all exchanges have been transferred,
and a run with exchanges begins with one in flight.
"""

from __future__ import annotations

import argparse
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
from step import ReportTotals, make_step, matmuls_for, settle  # noqa: E402

import jdaso  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100, help="of parameters")
    parser.add_argument("--leaves", type=int, default=160, help="arrays; ResNet-50 has 160")
    parser.add_argument("--seconds", type=float, default=1.0, help="computing time of a step")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=4, help="steps of one run")
    arguments = parser.parse_args()
    keep_memory()

    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm.Dup()
    say = print if topology.rank == 0 else lambda *_: None
    size = int(arguments.megabytes * 250_000 / arguments.leaves)
    params = [jnp.full((size,), float(i)) for i in range(arguments.leaves)]
    matrix = jnp.full((384, 384), 1 / 384)
    matmuls = max(comm.allgather(matmuls_for(arguments.seconds)))

    def prepare(tx):
        step = make_step(tx, matmuls)
        state = [jax.tree.map(jnp.copy, params), tx.init(params)]

        def run(steps):
            start = time.perf_counter()
            for _ in range(steps):
                *state[:], slope = step(*state, matrix)
            jax.block_until_ready((state, slope))
            return (time.perf_counter() - start) / steps

        for _ in range(3):  # compilation and first use of memory
            run(arguments.steps)
        return run

    sgd = optax.sgd(1.0)
    alone = prepare(sgd)

    def pair(run, exchange, totals):
        """Measures the seconds of a step alone and with exchanges."""
        settle(exchange)
        comm.Barrier()
        alone(arguments.steps)
        base = alone(arguments.steps)
        comm.Barrier()
        run(arguments.steps)  # so that an exchange is in flight when the timed run begins
        with totals:
            both = base, run(arguments.steps)
        return tuple(map(max, zip(*comm.allgather(both), strict=True)))

    blocking = jdaso.constant(4, 0)
    variants = {
        "daso, period 4, delay 1": lambda e: jdaso.daso(e, 4, 1),
        "daso, period 1, delay 1": lambda e: jdaso.daso(e, 1, 1),
        "daso, period 1, blocking": lambda e: jdaso.daso(e, 1, 0),
        "daso, period 4, 4 fragments": lambda e: jdaso.daso(e, 4, 1, fragments=4),
        "easgd, period 4": lambda e: jdaso.easgd(e, 4, alpha=0.1),
        "easgd, period 4, blocking": lambda e: jdaso.easgd(e, alpha=0.1, schedule=blocking),
    }
    say(machine())
    say(
        f"{topology.num_nodes} processes, one core each; {arguments.megabytes:g} MB of float32 "
        f"parameters in {arguments.leaves} leaves; {arguments.pairs} pairs of "
        f"{arguments.steps} steps"
    )
    say(f"{'exchange':28} {'alone':>8} {'with':>8} {'ratio':>7}  range        blocked/exchange")
    for name, variant in variants.items():
        exchange = jdaso.mpi_exchange(topology)
        run = prepare(jdaso.chain(sgd, variant(exchange)))
        totals = ReportTotals(exchange)
        pairs = [pair(run, exchange, totals) for _ in range(arguments.pairs)]
        ratios = [with_exchange / base for base, with_exchange in pairs]
        blocked = 1e3 * max(comm.allgather(totals.per_exchange("seconds_blocked")))
        say(
            f"{name:28} {statistics.median(p[0] for p in pairs):7.3f}s "
            f"{statistics.median(p[1] for p in pairs):7.3f}s {statistics.median(ratios):7.3f}  "
            f"{min(ratios):.3f}..{max(ratios):.3f}  {blocked:.1f} ms"
        )


if __name__ == "__main__":
    main()
