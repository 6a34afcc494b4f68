"""Measures the parts of an exchange: copies, transfer, waiting and merging.

    mpiexec -n 2 python bench/breakdown.py [--megabytes 100] [--period 4] [--delay 2]
        [--seconds 0.5] [--trace trace.json] [--callbacks]

Every process takes steps with DASO: a gradient that takes about the given time on one core, SGD
with momentum, and exchanges. The records of the exchanges give the times on the host. The times on
the device are differences between steps that post or merge and steps that do neither. A step that
merges is compared with a step without a transfer. The time of a step during a transfer is listed
as well. Times are printed in seconds and in units of one copy (memcpy) of the parameters. The
trace shows steps and exchanges of all processes in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time

from machine import keep_memory, machine, memcpy_seconds, own_core

os.environ.setdefault("NPROC", "16")
own_core()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from step import matmuls_for  # noqa: E402

import jdaso  # noqa: E402


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
    for row in ("copy_to_host", "transfer", "wait", "copy_to_device"):
        rows[row] = [(*getattr(record, row), f"exchange {record.number}") for record in history]
    found = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"{rank} {host}"}}]
    for thread, (row, spans) in enumerate(rows.items()):
        about = {"pid": rank, "tid": thread}
        found.append({"ph": "M", "name": "thread_name", "args": {"name": row}, **about})
        for start, end, name in spans:
            times = {"ts": 1e6 * (start - zero), "dur": 1e6 * (end - start)}
            found.append({"ph": "X", "name": name, **times, **about})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100)
    parser.add_argument("--leaves", type=int, default=160, help="arrays; ResNet-50 has 160")
    parser.add_argument("--period", type=int, default=4)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="computing time of a step")
    parser.add_argument("--exchanges", type=int, default=12)
    parser.add_argument("--callbacks", action="store_true", help="copy with host callbacks")
    parser.add_argument("--trace", help="file for a trace of all processes")
    options = parser.parse_args()
    if not 1 < options.delay < options.period - 1:
        parser.error(
            f"--delay must be above 1 and below --period - 1, got {options.delay} and "
            f"{options.period}: otherwise no step only posts or only merges."
        )
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm
    exchange = jdaso.mpi_exchange(topology, native=False if options.callbacks else None)
    size = int(options.megabytes * 250_000 / options.leaves)
    params = [jnp.full((size,), float(i + topology.rank)) for i in range(options.leaves)]
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
    if topology.rank:
        return
    if options.trace:
        with open(options.trace, "w") as file:
            json.dump([event for trace in traces for event in trace], file)
        print(f"trace: {options.trace}")
    if options.callbacks:  # JAX copies after the callback, within the step that merges
        del rows["copy to the device"]
    print(machine())
    print(
        f"{topology.num_nodes} processes, one core each; {options.megabytes:g} MB in "
        f"{options.leaves} leaves; {len(history)} exchanges, period {options.period}, delay "
        f"{options.delay}; a step that does neither takes {took['neither']:.3f} s, a copy of the "
        f"parameters {1e3 * copy:.1f} ms"
    )
    for name, value in rows.items():
        print(f"{name:46} {1e3 * value:8.1f} ms {value / copy:7.1f} copies")


if __name__ == "__main__":
    main()
