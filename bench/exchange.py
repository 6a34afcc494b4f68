"""Measures a single exchange: its rate, its parts within training, and its bytes.

    mpiexec -n 2 python bench/exchange.py [--megabytes 40] [--leaves 10 100 1000 10000]
    mpiexec -n 2 python bench/exchange.py parts [--leaves 160] [--callbacks] [--trace trace.json]
    mpiexec -n 4 python bench/exchange.py wires [--megabytes 10]
    python bench/lab/lab.py run --pin -- python bench/exchange.py wires     the same on shaped links

Without a name, training waits for each exchange at once. The columns are:

- "call": the time of a compiled program that takes the parameters and returns them.
- "start" and "finish": the additional time to copy parameters to the host, and to copy sums back.
- "transfer": the time from the post to the arrival of the sums.
- "allreduce": the time of MPI's blocking Allreduce of the same bytes, right before.
- "rate": the time of the Allreduce divided by that of the transfer.
- "beyond": start and finish together, in units of one copy (memcpy) of the parameters.
- "memory": the growth of the process in units of the parameters' bytes. It is printed in the first
  row only, because the other rows use memory that the first one has freed.

"parts" trains with DASO, on one core: a gradient that takes about the given time, SGD with
momentum, and exchanges, whose records give the times on the host. The times on the device are
differences between steps that post or merge and steps that do neither. A step that merges is
compared with a step without a transfer. The time of a step during a transfer is listed as well.
The trace shows steps and exchanges of all processes in https://ui.perfetto.dev.

"wires" awaits exchanges with every wire dtype. In an all-reduce of n bytes over P nodes each node
must send 2 (P-1)/P n bytes ("fewest"). "counted" is the largest number of bytes that a node reports
for its exchanges. In the network lab, "eth0" is the number of bytes on the busiest link, including
headers, handshakes and acknowledgements.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from machine import header, keep_memory, machine, memcpy_seconds, own_core, resident_bytes, row
from step import matmuls_for

import jdaso
from jdaso import perf
from jdaso.core.exchange import HEADER_SIZE

ETH0 = Path("/sys/class/net/eth0/statistics/tx_bytes")
DEFAULTS = {
    "rate": {"megabytes": 40, "leaves": [10, 100, 1000, 10_000]},
    # ResNet-50 has 160 arrays.
    "parts": {"megabytes": 100, "leaves": [160], "exchanges": 12},
    "wires": {"megabytes": 10, "leaves": [1], "exchanges": 5},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=DEFAULTS, default="rate")
    parser.add_argument("--megabytes", type=float, help="of float32 parameters")
    parser.add_argument("--leaves", type=int, nargs="+", help="numbers of arrays")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of exchange and Allreduce")
    parser.add_argument("--period", type=int, default=4, help="of the parts")
    parser.add_argument("--delay", type=int, default=2, help="of the parts")
    parser.add_argument("--seconds", type=float, default=0.5, help="computing time of a step")
    parser.add_argument("--exchanges", type=int, help="of the parts, or of a wire")
    parser.add_argument("--callbacks", action="store_true", help="copy with host callbacks")
    parser.add_argument("--trace", help="file for a trace of all processes")
    parser.set_defaults(**DEFAULTS[parser.parse_known_args()[0].part])
    options = parser.parse_args()
    if not 1 < options.delay < options.period - 1:
        parser.error(
            f"--delay must be above 1 and below --period - 1, got {options.delay} and "
            f"{options.period}: otherwise no step only posts or only merges."
        )
    return options


# -------------------------------------------------------------------------- An exchange by itself


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
        return *bound.post(state, number, number, leaves, header, "float32"), leaves

    @functools.partial(jax.jit, donate_argnums=2)
    def finish(state, number, leaves):
        sums, _, state = bound.collect(state, number, leaves)
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


def print_rate(options: argparse.Namespace, topology: jdaso.Topology, say: Callable) -> None:
    """Times of an exchange that is awaited, by the number of leaves."""
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

    copy = memcpy_seconds(options.megabytes)
    say(f"copied in {1e3 * copy:.1f} ms; medians of pairs, in ms\n")
    say(header("leaves", *Seconds._fields, "rate", "beyond", "memory"))
    for number, leaves in enumerate(options.leaves):
        parameters = [jnp.full((total // leaves,), float(i)) for i in range(leaves)]
        jax.block_until_ready(parameters)
        before = resident_bytes()
        once = prepare(jdaso.mpi_exchange(topology), parameters, allreduce)
        times = slowest([once() for _ in range(options.pairs + 2)][2:])
        grown = f"{(resident_bytes() - before) / (4 * total):.2f}" if number == 0 else "-"
        found = Seconds(*map(statistics.median, zip(*times, strict=True)))
        rate = statistics.median(pair.allreduce / pair.transfer for pair in times)
        beyond = (found.start + found.finish) / copy
        cells = (f"{1e3 * value:.1f}" for value in found)
        say(row(leaves, *cells, f"{rate:.2f}", f"{beyond:.1f}", grown), flush=True)


# ----------------------------------------------------------------------- Its parts within training


def train(tx, params, matmuls: int, steps: int):
    """Takes steps. Returns (begin, end, kind) of each step, the last state and the parameters."""
    matrix = jnp.full((384, 384), 1 / 384)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, grads):
        product = jax.lax.fori_loop(0, matmuls, lambda _, m: m @ matrix, matrix)
        # The gradient depends on the matmuls, so the update cannot run before they have ended.
        grads = jax.tree.map(lambda g: g * (1.0 + 0.0 * product[0, 0]), grads)
        params, state = jdaso.apply_gradients(tx, grads, state, params)
        return params, state, jdaso.metrics(state)

    grads = jax.tree.map(lambda x: 1e-6 * x, params)
    state, posted, found = tx.init(params), 0, []
    for _ in range(steps):
        start = time.monotonic()
        params, state, metrics = jax.block_until_ready(step(params, state, grads))
        end = time.monotonic()
        kinds = {
            "merges": metrics.merged,
            "posts": metrics.exchanges > posted,
            "during a transfer": metrics.in_flight > 0,
            "neither": True,
        }
        kind = next(name for name, is_so in kinds.items() if is_so)
        posted = int(metrics.exchanges)
        found.append((start, end, kind))
    return found, state, params


def events(rank: int, host: str, zero: float, steps, history) -> list[dict]:
    """The trace of a process in Chrome's format, in microseconds since ``zero``."""
    rows = {"steps": [(start, end, kind) for start, end, kind in steps]}
    for name in ("copy_to_host", "transfer", "wait", "copy_to_device"):
        rows[name] = [(*getattr(record, name), f"exchange {record.number}") for record in history]
    found = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"{rank} {host}"}}]
    for thread, (name, spans) in enumerate(rows.items()):
        about = {"pid": rank, "tid": thread}
        found.append({"ph": "M", "name": "thread_name", "args": {"name": name}, **about})
        for start, end, label in spans:
            times = {"ts": 1e6 * (start - zero), "dur": 1e6 * (end - start)}
            found.append({"ph": "X", "name": label, **times, **about})
    return found


def print_parts(options: argparse.Namespace, topology: jdaso.Topology, say: Callable) -> None:
    """Times of the parts of an exchange within training, for the first number of leaves."""
    comm, leaves = topology.comm, options.leaves[0]
    exchange = jdaso.mpi_exchange(topology, native=False if options.callbacks else None)
    size = int(options.megabytes * 250_000 / leaves)
    params = [jnp.full((size,), float(i + topology.rank)) for i in range(leaves)]
    matmuls = max(comm.allgather(matmuls_for(options.seconds)))
    averaging = jdaso.daso(exchange, options.period, options.delay)
    tx = jdaso.chain(optax.sgd(1.0, momentum=0.9), averaging)
    copy = max(comm.allgather(memcpy_seconds(options.megabytes)))
    comm.Barrier()
    zero = time.monotonic()  # the clocks of hosts differ
    steps, state, params = train(tx, params, matmuls, (options.exchanges + 2) * options.period)
    steps = steps[2 * options.period :]  # without compilation and first use of memory
    jax.block_until_ready(jdaso.drain(tx, state, params))
    history = exchange.history()[2:]

    def seconds(spans) -> float:
        return statistics.median(max(comm.allgather(end - start)) for start, end in spans)

    took = {
        kind: seconds([(start, end) for start, end, k in steps if k == kind])
        for kind in ("neither", "posts", "during a transfer", "merges")
    }
    rows = {
        "copy to the host, cast": seconds([record.copy_to_host for record in history]),
        "transfer": seconds([record.transfer for record in history]),
        "training waits": seconds([record.wait for record in history]),
        "copy to the device": seconds([record.copy_to_device for record in history]),
        "a step that posts, beyond others": took["posts"] - took["neither"],
        "a step that merges, beyond others and waiting": took["merges"]
        - took["neither"]
        - seconds([record.wait for record in history]),
        "a step during a transfer, beyond others": took["during a transfer"] - took["neither"],
    }
    traces = comm.gather(events(topology.rank, topology.host, zero, steps, history))
    if options.trace and topology.rank == 0:
        with open(options.trace, "w") as file:
            json.dump([event for trace in traces for event in trace], file)
        print(f"trace: {options.trace}")
    if options.callbacks:  # JAX copies after the callback, within the step that merges
        del rows["copy to the device"]
    say(
        f"one core each; {len(history)} exchanges, period {options.period}, delay "
        f"{options.delay}; a step that does neither takes {took['neither']:.3f} s, a copy of the "
        f"parameters {1e3 * copy:.1f} ms\n\n{header('', 'ms', 'copies')}"
    )
    for name, value in rows.items():
        say(row(name, f"{1e3 * value:.1f}", f"{value / copy:.1f}"))


# ------------------------------------------------------------------------------ Bytes of each wire


def print_wires(options: argparse.Namespace, topology: jdaso.Topology, say: Callable) -> None:
    """Bytes and seconds of an exchange with every wire."""
    comm, nodes = topology.comm, topology.num_nodes
    count = int(options.megabytes * 250_000)
    leaf = jnp.ones(count)
    in_lab = min(comm.allgather(len({process.host for process in topology.processes}) == nodes))

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

    say(header("wire", "fewest, MB", "counted / fewest", "eth0 / fewest", "seconds"), flush=True)
    for wire in ("float32", "bfloat16", "float16", "int8", "float4"):
        fewest = 2 * (nodes - 1) / nodes * perf.wire_bytes(count, wire)
        counted, link, seconds = measure(wire)
        on_link = f"{link / fewest:.4f}" if in_lab else "-"
        cells = f"{fewest / 1e6:.3f}", f"{counted / fewest:.4f}", on_link, f"{seconds:.3f}"
        say(row(wire, *cells), flush=True)


def main() -> None:
    options = parse()
    if options.part == "parts":
        own_core()
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    say = print if topology.rank == 0 else lambda *_, **__: None
    say(machine())
    leaves = ", ".join(map(str, options.leaves))
    say(f"{topology.num_nodes} processes, {options.megabytes:g} MB of float32 in {leaves} leaves")
    parts = {"rate": print_rate, "parts": print_parts, "wires": print_wires}
    parts[options.part](options, topology, say)


if __name__ == "__main__":
    main()
