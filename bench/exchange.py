"""Measures a single exchange: its rate relative to MPI's, its cost by leaves, and its memory.

    mpiexec -n 2 python bench/exchange.py [--megabytes 40] [--leaves 10 100 1000 10000]
    python bench/lab/lab.py run --pin -- python bench/exchange.py       the same on shaped links

Training waits for each exchange at once. The columns are:

- "call": the time of a compiled program that takes the parameters and returns them.
- "start" and "finish": the additional time to copy parameters to the host, and to copy sums back.
- "transfer": the time from the post to the arrival of the sums.
- "allreduce": the time of MPI's blocking Allreduce of the same bytes, right before.
- "rate": the time of the Allreduce divided by that of the transfer.
- "beyond": start and finish together, in units of one copy (memcpy) of the parameters.
- "memory": the growth of the process in units of the parameters' bytes. It is printed in the first
  row only, because the other rows use memory that the first one has freed.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
from machine import keep_memory, machine, memcpy_seconds

import jdaso
from jdaso.core.exchange import HEADER_SIZE


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Seconds(NamedTuple):
    """Times of the parts of an exchange, and of MPI's Allreduce."""

    call: float
    start: float
    transfer: float
    finish: float
    allreduce: float


def prepare(exchange: jdaso.Exchange, leaves: list[jax.Array], allreduce: Callable[[], float]):
    """Returns a function that measures one exchange."""
    header = jnp.zeros(HEADER_SIZE).at[0].set(1.0)
    bound = exchange.bind((), leaves)

    # As in a training step, the parameters are donated and keep their memory.
    @functools.partial(jax.jit, donate_argnums=2)
    def call(state, number, leaves):
        return state, number, leaves

    @functools.partial(jax.jit, donate_argnums=2)
    def start(state, number, leaves):
        return *bound.start(state, number, number, leaves, header, "float32"), leaves

    @functools.partial(jax.jit, donate_argnums=2)
    def finish(state, number, leaves):
        sums, _, state = bound.finish(state, number, leaves)
        return state, number, sums

    carried = exchange.init(leaves), jnp.int32(0), leaves

    def timed(program) -> float:
        nonlocal carried
        since = time.perf_counter()
        carried = jax.block_until_ready(program(*carried))
        return time.perf_counter() - since

    def once() -> Seconds:
        nonlocal carried
        base, alone, number = allreduce(), timed(call), carried[1]
        started = timed(start)
        following, carried = carried[1], (carried[0], number, carried[2])
        finished = timed(finish)
        carried = carried[0], following, carried[2]
        record = exchange.history()[-1]
        waited = record.wait[1] - record.wait[0]
        transfer = record.transfer[1] - record.transfer[0]
        return Seconds(alone, started - alone, transfer, finished - waited - alone, base)

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=40, help="of parameters")
    parser.add_argument(
        "--leaves",
        type=int,
        nargs="+",
        default=[10, 100, 1000, 10_000],
        help="numbers of arrays",
    )
    parser.add_argument("--pairs", type=int, default=9, help="pairs of exchange and Allreduce")
    options = parser.parse_args()
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm
    total = int(options.megabytes * 250_000)
    source, target = np.ones(total, np.float32), np.ones(total, np.float32)

    def allreduce() -> float:
        comm.Barrier()
        start = time.perf_counter()
        comm.Allreduce(source, target)
        seconds = time.perf_counter() - start
        comm.Barrier()
        return seconds

    def slowest(times: list[Seconds]) -> list[Seconds]:
        nodes = zip(*comm.allgather(times), strict=True)
        return [Seconds(*(max(of) for of in zip(*pair, strict=True))) for pair in nodes]

    say = print if topology.rank == 0 else lambda *_, **__: None
    say(machine())
    copy = memcpy_seconds(options.megabytes)
    say(
        f"{topology.num_nodes} processes; {options.megabytes:g} MB of float32, which are copied in "
        f"{1e3 * copy:.1f} ms; medians of pairs, in ms"
    )
    columns = ("leaves", *Seconds._fields, "rate", "beyond", "memory")
    say("".join(f"{name:>10}" for name in columns))
    for row, leaves in enumerate(options.leaves):
        parameters = [jnp.full((total // leaves,), float(i)) for i in range(leaves)]
        jax.block_until_ready(parameters)
        before = resident_bytes()
        once = prepare(jdaso.mpi_exchange(topology), parameters, allreduce)
        times = slowest([once() for _ in range(options.pairs + 2)][2:])
        grown = f"{(resident_bytes() - before) / (4 * total):.2f}" if row == 0 else "-"
        found = Seconds(*map(statistics.median, zip(*times, strict=True)))
        rate = statistics.median(pair.allreduce / pair.transfer for pair in times)
        beyond = (found.start + found.finish) / copy
        milliseconds = "".join(f"{1e3 * value:10.1f}" for value in found)
        say(f"{leaves:10}{milliseconds}{rate:10.2f}{beyond:10.1f}{grown:>10}", flush=True)


if __name__ == "__main__":
    main()
