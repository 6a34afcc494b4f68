"""One exchange, and nothing else: its rate beside MPI's own, its cost by number of leaves, memory.

    mpiexec -n 2 python bench/exchange.py [--megabytes 40] [--leaves 10 100 1000 10000]
    python bench/lab/lab.py run --pin -- python bench/exchange.py       the same on shaped links

An exchange is awaited at once. "rate" is its time from post to arrival, and MPI's blocking
Allreduce of the same bytes divided by that, in pairs. "start" and "finish" are the calls that copy
the parameters to the host and the sums back. Host memory is what the process has grown by, from
before the first exchange to after the last, in units of the parameters' bytes; in the first row
only, since what that has freed serves the others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
from machine import keep_memory, machine

import jdaso
from jdaso._base import HEADER_SIZE


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prepare(exchange: jdaso.Exchange, leaves: list[jax.Array]):
    """``once() -> (start, flight, finish)``, the seconds of an exchange and of the calls."""
    header = jnp.zeros(HEADER_SIZE).at[0].set(1.0)
    start = jax.jit(lambda s, n, leaves: exchange.start(s, n, n, leaves, header, "float32"))
    finish = jax.jit(lambda s, n, leaves: exchange.finish(s, n, leaves))
    state, number = exchange.init(leaves), jnp.int32(0)

    def once() -> tuple[float, float, float]:
        nonlocal state, number
        since = time.perf_counter()
        state, following = jax.block_until_ready(start(state, number, leaves))
        posted = time.perf_counter()
        _, _, state = jax.block_until_ready(finish(state, number, leaves))
        end, number = time.perf_counter(), following
        flown = exchange.history()[-1]
        waited = flown.wait[1] - flown.wait[0]
        return posted - since, flown.flight[1] - flown.flight[0], end - posted - waited

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=40)
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--pairs", type=int, default=9)
    options = parser.parse_args()
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm
    total = int(options.megabytes * 250_000)
    source, target = np.ones(total, np.float32), np.ones(total, np.float32)

    def slowest(values: list[float]) -> float:
        return statistics.median(max(found) for found in zip(*comm.allgather(values), strict=True))

    def raw() -> float:
        comm.Barrier()
        start = time.perf_counter()
        comm.Allreduce(source, target)
        return time.perf_counter() - start

    say = print if topology.rank == 0 else lambda *_, **__: None
    say(machine())
    say(f"{topology.num_nodes} processes; {options.megabytes:g} MB of float32; medians of pairs")
    say(
        f"{'leaves':>7} {'start':>10} {'flight':>10} {'finish':>10} {'Allreduce':>10} {'rate':>6} "
        f"{'host memory':>12}"
    )
    for row, leaves in enumerate(options.leaves):
        parameters = [jnp.full((total // leaves,), float(i)) for i in range(leaves)]
        jax.block_until_ready(parameters)
        before = resident_bytes()
        exchange = jdaso.mpi_exchange(topology)
        once = prepare(exchange, parameters)
        times = []
        for pair in range(-2, options.pairs):
            base = raw()
            comm.Barrier()
            times += [(*once(), base)] if pair >= 0 else []
            if pair < 0:
                once()
        grown = f"{(resident_bytes() - before) / (4 * total):.2f}" if row == 0 else "-"
        start, flight, finish, base = (slowest(list(t)) for t in zip(*times, strict=True))
        rates = [
            max(pair[3] for pair in pairs) / max(pair[1] for pair in pairs)
            for pairs in zip(*comm.allgather(times), strict=True)
        ]
        say(
            f"{leaves:7} {1e3 * start:7.1f} ms {1e3 * flight:7.1f} ms {1e3 * finish:7.1f} ms "
            f"{1e3 * base:7.1f} ms {statistics.median(rates):6.2f} {grown:>12}",
            flush=True,
        )


if __name__ == "__main__":
    main()
