"""Measures what an exchange in flight costs a training step, in paired runs.

    mpiexec -n 2 python bench/overlap.py [--megabytes 100] [--seconds 1] [--pairs 7]
    mpiexec -n 2 python bench/overlap.py free [--wires float32 int8] [--guards off] [--heap default]
    bench/lab/lab.py run --pin -- python bench/overlap.py tcp [--period 3] [--delay 2]

Every process has one core, and trains parameters of the given size by SGD. A pair takes the same
number of steps alone and with exchanges. A run alone begins after all exchanges have been
transferred, and a run with exchanges begins with one in flight. The tables have the median of the
pairs' ratios on the slowest process with its range, and the mean time for which an exchange blocks
training.

- busy: a step computes for about the given time. EASGD computes the same numbers with a delay of
  one period and with blocking exchanges.
- free: a step begins with a sleep, which leaves the core free, as an accelerator does. The
  gradients are arrays in memory, as those of a backward pass are. What remains is what jdaso costs.
- tcp: beside the training without exchanges, another process on the core of each of two nodes sends
  and receives, once in each period, the bytes of an exchange in bfloat16 through a plain socket,
  and does nothing with them. The training waits for them when DASO would. The row "DASO" makes the
  exchanges. Each round takes the same number of steps for each row.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import optax
from machine import header, keep_memory, machine, own_core, row
from step import (
    SGD,
    ReportTotals,
    apply_gradients,
    make_step,
    matmuls_for,
    pair,
    ratio_cells,
    settle,
    timed,
)

import jdaso

CHUNK = 1 << 18  # bytes
# Megabytes of float32, 160 arrays as in ResNet-50, or the network of bench/peers.
DEFAULTS = {
    "busy": {"megabytes": 100, "leaves": 160, "seconds": 1.0, "period": 4, "delay": 1},
    "free": {"megabytes": 16.16, "leaves": 60, "seconds": 0.165, "period": 6, "delay": 5},
    "tcp": {"megabytes": 16.16, "leaves": 60, "seconds": 0.165, "period": 3, "delay": 2},
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=DEFAULTS, default="busy")
    parser.add_argument("--megabytes", type=float, help="of float32 parameters")
    parser.add_argument("--leaves", type=int, help="arrays")
    parser.add_argument("--seconds", type=float, help="computing time of a step")
    parser.add_argument("--period", type=int, help="of DASO")
    parser.add_argument("--delay", type=int, help="of DASO")
    parser.add_argument("--pairs", type=int, default=7, help="pairs or rounds of runs")
    parser.add_argument("--wires", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--guards", nargs="+", choices=("off", "skip"), default=["off", "skip"])
    parser.add_argument("--heap", choices=("kept", "default"), default="kept")
    parser.add_argument("--move", nargs=2, metavar=("ADDRESS", "BYTES"), help=argparse.SUPPRESS)
    parser.set_defaults(**DEFAULTS[parser.parse_known_args()[0].part])
    return parser.parse_args()


def busy(arguments, topology, params, say):
    """Steps that compute, for several algorithms."""
    comm, sgd, steps = topology.comm.Dup(), optax.sgd(1.0), arguments.period
    matmuls = max(comm.allgather(matmuls_for(arguments.seconds)))

    def prepare(tx):
        run = timed(make_step(tx, matmuls), [jax.tree.map(jnp.copy, params), tx.init(params)])
        for _ in range(3):  # compilation and first use of memory
            run(steps)
        return run

    alone = prepare(sgd)
    period, delay = arguments.period, arguments.delay
    late = f"period {period}, delay {delay}"
    variants = {
        f"daso, {late}": lambda e: jdaso.daso(e, period, delay),
        "daso, period 1, delay 1": lambda e: jdaso.daso(e, 1, 1),
        "daso, period 1, blocking": lambda e: jdaso.daso(e, 1, 0),
        f"daso, {late}, 4 fragments": lambda e: jdaso.daso(e, period, delay, fragments=4),
        f"easgd, period {period}": lambda e: jdaso.easgd(e, period, alpha=0.1),
        f"easgd, period {period}, blocking": lambda e: jdaso.easgd(
            e, alpha=0.1, schedule=jdaso.constant(period, 0)
        ),
    }
    say(header("exchange", "alone, s", "with, s", "ratio", "range", "blocked per exchange, ms"))
    for name, variant in variants.items():
        exchange = jdaso.mpi_exchange(topology)
        within, totals = prepare(jdaso.chain(sgd, variant(exchange))), ReportTotals(exchange)
        measure = functools.partial(pair, comm, exchange, totals, alone, within, steps, steps)
        print_row(say, comm, totals, [name], [measure() for _ in range(arguments.pairs)], 1, 3)


def free(arguments, topology, params, say):
    """Steps that leave the core free, for wires and guards."""
    comm, steps = topology.comm.Dup(), 2 * arguments.period

    def prepare(tx):
        grads = [1e-6 * x for x in params]

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, grads):
            return apply_gradients(tx, grads, opt_state, params)

        def slept(*state):
            time.sleep(arguments.seconds)
            return jax.block_until_ready(step(*state))

        run = timed(slept, [jax.tree.map(jnp.copy, params), tx.init(params)], grads)
        run(steps)  # compilation and first use of memory
        return run

    alone = prepare(SGD)
    schedule = jdaso.constant(arguments.period, arguments.delay)
    say(header("wire", "guard", "alone, ms", "with, ms", "ratio", "range", "blocked, ms"))
    for wire, guard in itertools.product(arguments.wires, arguments.guards):
        exchange = jdaso.mpi_exchange(topology)
        averaging = jdaso.daso(exchange, schedule=schedule, wire=wire, nonfinite=guard)
        within, totals = prepare(jdaso.chain(SGD, averaging)), ReportTotals(exchange)
        rest = alone, within, steps, arguments.period
        found = [pair(comm, exchange, totals, *rest) for _ in range(arguments.pairs)]
        print_row(say, comm, totals, [wire, guard], found, 1e3, 1)
        exchange.close()


def print_row(say, comm, totals, names, found, unit, digits):
    """Prints the medians of pairs, their ratios, and for how long an exchange blocked."""
    blocked = 1e3 * max(comm.allgather(totals.per_exchange("seconds_blocked")))
    times = (unit * statistics.median(each) for each in zip(*found, strict=True))
    medians = (f"{x:.{digits}f}" for x in times)
    say(row(*names, *medians, *ratio_cells(found), f"{blocked:.1f}"), flush=True)


# ------------------------------------------------------------------------------ Beside plain TCP


def move(address, size):
    """Moves bytes between two hosts at each line of the input, and answers with a line."""
    host, port = address.rsplit(":", 1)
    if host:
        link = socket.create_connection((host, int(port)))
    else:
        with socket.create_server(("", 0)) as server:
            print(server.getsockname()[1], flush=True)
            link, _ = server.accept()
    chunk, into = bytes(CHUNK), bytearray(CHUNK)

    def send():
        left = size
        while left:
            left -= link.send(chunk[:left])

    for _ in sys.stdin:
        sender = threading.Thread(target=send)
        sender.start()
        left = size
        while left:
            if not (count := link.recv_into(into, min(left, CHUNK))):
                sys.exit("overlap.py: the process on the other node has ended")
            left -= count
        sender.join()
        print("moved", flush=True)


class Mover:
    """Another process on this core that moves bytes, beside the training."""

    def __init__(self, comm, size):
        def start(address):
            command = [sys.executable, __file__, "--move", address, str(size)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return subprocess.Popen(command, text=True, bufsize=1, **pipes)

        own = None
        if comm.rank == 0:
            self._process = start(":0")
            own = f"{socket.gethostbyname(socket.gethostname())}:{self._process.stdout.readline()}"
        address = comm.bcast(own)
        if comm.rank == 1:
            self._process = start(address.strip())
        self._moving = False

    def wait(self):
        if self._moving and self._process.stdout.readline() != "moved\n":
            raise RuntimeError("the process that moves bytes has ended")
        self._moving = False

    def begin(self):
        self.wait()
        self._process.stdin.write("\n")
        self._moving = True

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def tcp(arguments, topology, params, say):
    """Steps alone, beside a socket that moves as many bytes, and with exchanges."""
    comm, sgd = topology.comm.Dup(), optax.sgd(1.0)
    if topology.num_nodes != 2:
        sys.exit(f"overlap.py tcp needs 2 nodes, got {topology.num_nodes}.")
    period, delay = arguments.period, arguments.delay
    matmuls = max(comm.allgather(matmuls_for(arguments.seconds)))
    # With two nodes each sends and receives the size of the parameters on the wire.
    mover = Mover(comm, sum(2 * x.size for x in params))
    exchange = jdaso.mpi_exchange(topology)
    averaging = jdaso.daso(exchange, schedule=jdaso.constant(period, delay), wire="bfloat16")

    def prepare(tx, begin=lambda: None, merge=lambda: None):
        step, state = make_step(tx, matmuls), [jax.tree.map(jnp.copy, params), tx.init(params)]

        def run():
            start = time.perf_counter()
            for t in range(3 * period):
                *state[:], slope = step(*state)
                jax.block_until_ready((state, slope))
                if t % period == delay - 1:
                    merge()
                if t % period == period - 1:
                    begin()
            return (time.perf_counter() - start) / (3 * period)

        for _ in range(2):  # compilation and first use of memory
            run()
        return run

    def measure(run, end):
        comm.Barrier()
        run()
        seconds = run()
        end()
        return max(comm.allgather(seconds))

    rows = {
        "alone": (prepare(sgd), lambda: None),
        "TCP": (prepare(sgd, mover.begin, mover.wait), mover.wait),
        "DASO": (prepare(jdaso.chain(sgd, averaging)), lambda: settle(exchange)),
    }
    mover.wait()
    settle(exchange)
    rounds = [{k: measure(*of) for k, of in rows.items()} for _ in range(arguments.pairs)]
    mover.close()
    say(header("", "a step, s", "ratio", "range"))
    for name in rows:
        cells = ratio_cells([(each["alone"], each[name]) for each in rounds])
        seconds = statistics.median(each[name] for each in rounds)
        say(row(name, f"{seconds:.4f}", *cells), flush=True)


def main():
    arguments = parse()
    if arguments.move:
        return move(arguments.move[0], int(arguments.move[1]))
    own_core()
    if arguments.heap == "kept":
        keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    say = print if topology.rank == 0 else lambda *_, **__: None
    size = round(arguments.megabytes * 250_000 / arguments.leaves)
    params = [jnp.full((size,), 1.0 + i) for i in range(arguments.leaves)]
    say(machine())
    say(
        f"{topology.num_nodes} processes, one core each; {arguments.megabytes:g} MB of float32 "
        f"parameters in {arguments.leaves} leaves; period {arguments.period}, delay "
        f"{arguments.delay}; {arguments.pairs} pairs; {arguments.heap} heap\n"
    )
    {"busy": busy, "free": free, "tcp": tcp}[arguments.part](arguments, topology, params, say)


if __name__ == "__main__":
    main()
