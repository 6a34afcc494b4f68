"""Measures bytes and seconds of an exchange with every wire dtype.

    mpiexec -n 4 python bench/wires.py [--megabytes 10]
    python bench/lab/lab.py run --pin -- python bench/wires.py          the same on shaped links

In an all-reduce of n bytes over P nodes each node must send 2 (P-1)/P n bytes ("fewest").
"counted" is the largest number of bytes that a node reports for its exchanges. In the network lab,
"eth0" is the number of bytes on the busiest link, including headers, handshakes and
acknowledgements.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import optax
from machine import keep_memory, machine

import jdaso
from jdaso import perf

ETH0 = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=10, help="of float32")
    parser.add_argument("--exchanges", type=int, default=5, help="measured for each row")
    options = parser.parse_args()
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm, nodes = topology.comm, topology.num_nodes
    count = int(options.megabytes * 250_000)
    leaf = jnp.ones(count)
    in_lab = min(comm.allgather(len({process.host for process in topology.processes}) == nodes))
    say = print if topology.rank == 0 else lambda *_, **__: None

    def measure(wire: str) -> tuple[float, float, float]:
        """Returns the busiest node's counted bytes and bytes on eth0, and seconds, per exchange."""
        exchange = jdaso.mpi_exchange(topology)
        tx = jdaso.chain(optax.sgd(1.0), jdaso.allreduce_gradients(exchange, wire=wire))

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, grads):
            return jdaso.apply_gradients(tx, grads, state, params)

        params = jnp.ones(count)
        params, state = jax.block_until_ready(step(params, tx.init(params), leaf))
        before, times = exchange.report()["bytes_sent"], []
        comm.Barrier()
        link = int(ETH0.read_text()) if in_lab else 0
        for _ in range(options.exchanges):
            comm.Barrier()
            start = time.perf_counter()
            params, state = jax.block_until_ready(step(params, state, leaf))
            times.append(time.perf_counter() - start)
        comm.Barrier()
        link = (int(ETH0.read_text()) if in_lab else 0) - link
        sent = comm.allgather(exchange.report()["bytes_sent"] - before)
        slowest = statistics.median(map(max, zip(*comm.allgather(times), strict=True)))
        return max(sent) / options.exchanges, max(comm.allgather(link)) / options.exchanges, slowest

    say(machine())
    say(f"{nodes} nodes; {count} parameters")
    say("| wire | fewest, MB | counted / fewest | eth0 / fewest | seconds |")
    say("|---|---|---|---|---|", flush=True)
    for wire in ("float32", "bfloat16", "float16", "int8", "float4"):
        fewest = 2 * (nodes - 1) / nodes * perf.wire_bytes(count, wire)
        counted, link, seconds = measure(wire)
        on_link = f"{link / fewest:.4f}" if in_lab else "-"
        say(
            f"| {wire} | {fewest / 1e6:.3f} | {counted / fewest:.4f} | {on_link} | {seconds:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
