"""Compares the smallest delay at which training never waits with the recommended one.

    python bench/lab/lab.py up --nodes 2 --rate 200mbit --delay 1ms
    python bench/lab/lab.py run --pin -- python bench/delays.py [--megabytes 10] [--seconds 0.8 0.4]

For each step time the script measures a step without exchanges and the transfer of an exchange
during training. It passes both to jdaso.perf.hiding_schedule, and trains with the recommended delay
and its neighbours. A step counts as not waiting if the wait is less than a hundredth of the step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import optax
from machine import keep_memory, machine
from step import make_step, matmuls_for

import jdaso

LEAVES = 100
NEGLIGIBLE = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=10, help="of parameters")
    parser.add_argument(
        "--seconds",
        type=float,
        nargs="+",
        default=[0.8, 0.4, 0.25, 0.15, 0.1],
        help="times of a step",
    )
    parser.add_argument("--exchanges", type=int, default=12, help="exchanges of a run")
    options = parser.parse_args()
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm
    exchange = jdaso.mpi_exchange(topology)
    size = int(options.megabytes * 250_000 / LEAVES)
    params = [jnp.full((size,), float(i + topology.rank)) for i in range(LEAVES)]
    matrix = jnp.full((384, 384), 1 / 384)
    sgd = optax.sgd(1.0)
    say = print if topology.rank == 0 else lambda *_, **__: None

    def longest(values: list[float]) -> float:
        """The median of the times of the slowest node."""
        return statistics.median(max(found) for found in zip(*comm.allgather(values), strict=True))

    def train(matmuls: int, steps: int, tx) -> list[float]:
        """Takes steps and returns the seconds of each."""
        step, times = make_step(tx, matmuls), []
        state = [jax.tree.map(jnp.copy, params), tx.init(params)]
        comm.Barrier()
        for _ in range(steps):
            start = time.perf_counter()
            *state[:], slope = step(*state, matrix)
            jax.block_until_ready((state, slope))
            times.append(time.perf_counter() - start)
        return times

    def with_exchanges(matmuls: int, delay: int) -> tuple[float, float]:
        """Measures the transfer and the wait of an exchange, in seconds."""
        schedule = jdaso.constant(delay + 1, delay)
        tx = jdaso.chain(sgd, jdaso.daso(exchange, schedule=schedule))
        train(matmuls, (options.exchanges + 3) * (delay + 1), tx)
        # The first exchanges include compilation and the first use of memory.
        records = exchange.history()[-options.exchanges :]
        transfers = [end - start for start, end in (record.transfer for record in records)]
        waits = [end - start for start, end in (record.wait for record in records)]
        return longest(transfers), longest(waits)

    say(machine())
    say(f"{topology.num_nodes} nodes, one core each; {options.megabytes:g} MB of float32")
    say("| step, s | exchange, s | steps | recommended | waits, ms, by delay | waits no more at |")
    say("|---|---|---|---|---|---|", flush=True)
    for seconds in options.seconds:
        matmuls = max(comm.allgather(matmuls_for(seconds)))
        alone = longest(train(matmuls, 10, sgd)[2:])
        blocking, _ = with_exchanges(matmuls, 0)
        transfer, _ = with_exchanges(matmuls, int(blocking / alone) + 2)
        recommended = jdaso.perf.hiding_schedule(alone, transfer).delay
        waits = {
            delay: with_exchanges(matmuls, delay)[1]
            for delay in range(max(recommended - 1, 0), recommended + 3)
        }
        enough = [delay for delay, wait in waits.items() if wait < NEGLIGIBLE * alone]
        listed = ", ".join(f"{delay}: {1e3 * wait:.1f}" for delay, wait in waits.items())
        found = min(enough) if enough else f"above {max(waits)}"
        times = f"{alone:.3f} | {transfer:.3f} | {transfer / alone:.2f}"
        say(f"| {times} | {recommended} | {listed} | {found} |", flush=True)


if __name__ == "__main__":
    main()
