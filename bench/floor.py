"""Measures what TCP alone costs a step when it moves the bytes of an exchange.

    bench/lab/lab.py run --pin -- python bench/floor.py [--millions 4.04] [--period 3] [--delay 2]

Two nodes. In the row "TCP" each trains without exchanges, while another process on its core sends
and receives, once in each period, the bytes of an exchange in bfloat16 through a plain socket, and
does nothing with them. The training waits for them when DASO would. The row "DASO" makes the
exchanges. Each round measures training alone and both rows, for the same number of steps. The table
has the medians of the slowest node, and the median ratio to training alone with its range.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

from machine import keep_memory, machine, own_core

os.environ.setdefault("NPROC", "16")
CHUNK = 1 << 18  # bytes


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
                sys.exit("floor.py: the process on the other node has ended")
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


def main(arguments):
    own_core()
    import jax
    import jax.numpy as jnp
    import optax
    from step import make_step, matmuls_for, settle

    import jdaso

    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    if topology.num_nodes != 2:
        sys.exit(f"floor.py needs 2 nodes, got {topology.num_nodes}.")
    comm = topology.comm.Dup()
    say = print if topology.rank == 0 else lambda *_, **__: None
    leaf = round(arguments.millions * 1e6 / arguments.leaves)
    params = [jnp.full((leaf,), float(i)) for i in range(arguments.leaves)]
    matmuls = max(comm.allgather(matmuls_for(arguments.seconds)))
    # With two nodes each sends and receives the size of the parameters on the wire.
    mover = Mover(comm, 2 * leaf * arguments.leaves)
    exchange = jdaso.mpi_exchange(topology)
    schedule = jdaso.constant(arguments.period, arguments.delay)
    daso = jdaso.chain(optax.sgd(1.0), jdaso.daso(exchange, schedule=schedule, wire="bfloat16"))
    matrix = jnp.full((384, 384), 1 / 384)

    def prepare(tx, begin=lambda: None, merge=lambda: None):
        step, state = make_step(tx, matmuls), [jax.tree.map(jnp.copy, params), tx.init(params)]

        def run():
            start = time.perf_counter()
            for t in range(3 * arguments.period):
                *state[:], slope = step(*state, matrix)
                jax.block_until_ready((state, slope))
                if t % arguments.period == arguments.delay - 1:
                    merge()
                if t % arguments.period == arguments.period - 1:
                    begin()
            return (time.perf_counter() - start) / (3 * arguments.period)

        for _ in range(2):  # compilation and first use of memory
            run()
        return run

    def measure(run, end):
        comm.Barrier()
        run()
        seconds = run()
        end()
        return max(comm.allgather(seconds))

    sgd = optax.sgd(1.0)
    rows = {
        "alone": (prepare(sgd), lambda: None),
        "TCP": (prepare(sgd, mover.begin, mover.wait), mover.wait),
        "DASO": (prepare(daso), lambda: settle(exchange)),
    }
    mover.wait()
    settle(exchange)
    rounds = [{k: measure(*row) for k, row in rows.items()} for _ in range(arguments.rounds)]
    mover.close()
    say(machine())
    say(
        f"2 nodes, one core each; {arguments.millions:g} M parameters in {arguments.leaves} "
        f"leaves, bfloat16, period {arguments.period}, delay {arguments.delay}; "
        f"{arguments.rounds} rounds\n"
    )
    say("| | a step, s | ratio | range |\n|---|---|---|---|")
    for name in rows:
        ratios = [each[name] / each["alone"] for each in rounds]
        seconds = statistics.median(each[name] for each in rounds)
        span = f"{min(ratios):.3f}..{max(ratios):.3f}"
        say(f"| {name} | {seconds:.4f} | {statistics.median(ratios):.3f} | {span} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=float, default=4.04, help="million parameters")
    parser.add_argument("--leaves", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=0.165, help="computing time of a step")
    parser.add_argument("--period", type=int, default=3)
    parser.add_argument("--delay", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--move", nargs=2, metavar=("ADDRESS", "BYTES"), help="for its own use")
    found = parser.parse_args()
    if found.move:
        with contextlib.suppress(KeyboardInterrupt):
            move(found.move[0], int(found.move[1]))
    else:
        main(found)
