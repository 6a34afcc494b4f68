"""Measures the time from discover_topology to the first exchange, beside that of the imports.

    python bench/start.py --processes 2 8 24 [--rounds 3]

Each round runs two jobs one after the other. In the first one, the processes import JAX, optax and
mpi4py, find their devices, and meet at a barrier. In the second one, they import jdaso as well,
call discover_topology and mpi_exchange, and take a training step of DASO that exchanges 1000
numbers. The table has the seconds of the imports, from the start of the launcher until the last
process is ready; those from discover_topology to the first exchange; their ratio; and the seconds
of each part. All are medians over rounds. A step without exchanges would compile as well.
"""

import argparse
import itertools
import os
import statistics
import sys
import time

os.environ.setdefault("NPROC", "4")

PARTS = ("discover_topology", "mpi_exchange", "init", "first step")


def bare(started: float) -> list[float]:
    """Seconds until all have imported what jdaso imports."""
    import jax
    import optax  # noqa: F401
    from mpi4py import MPI

    jax.local_devices()
    MPI.COMM_WORLD.Barrier()
    return MPI.COMM_WORLD.allreduce([time.time() - started], op=lambda a, b: [*map(max, a, b)])


def whole(started: float) -> list[float]:
    """Seconds until each of the parts has ended."""
    import jax
    import jax.numpy as jnp
    import optax

    import jdaso

    ends = [time.time() - started]
    topology = jdaso.discover_topology(processes_per_node=1)
    ends.append(time.time() - started)
    exchange = jdaso.mpi_exchange(topology)
    ends.append(time.time() - started)
    tx = jdaso.chain(optax.sgd(0.1), jdaso.daso(exchange, 1, 0))

    @jax.jit
    def step(params, state):
        return jdaso.apply_gradients(tx, params, state, params)

    params = jnp.ones(1000)
    state = jax.block_until_ready(tx.init(params))
    ends.append(time.time() - started)
    jax.block_until_ready(step(params, state))
    ends.append(time.time() - started)
    return topology.comm.allreduce(ends, op=lambda a, b: [*map(max, a, b)])


def measure(processes: int, rounds: int) -> str:
    """A row of the table."""
    from mpi_job import run

    found: dict[str, list[list[float]]] = {"bare": [], "whole": []}
    for _ in range(rounds):
        for what, results in found.items():
            job = run(processes, 300, __file__, "--job", what, time.time())
            if job.problem is not None:
                raise SystemExit(f"{job.problem}\n{job.stderr}")
            (line,) = (line for line in job.stdout.splitlines() if line.startswith("ends"))
            results.append([float(end) for end in line.split()[1:]])
    pairs = zip(found["bare"], found["whole"], strict=True)
    ratio = statistics.median((b[-1] - b[0]) / a[0] for a, b in pairs)
    imports = statistics.median(ends[0] for ends in found["bare"])
    ends = [statistics.median(each) for each in zip(*found["whole"], strict=True)]
    parts = [b - a for a, b in itertools.pairwise(ends)]
    cells = [imports, ends[-1] - ends[0], ratio, *parts]
    return f"| {processes} | {' | '.join(f'{cell:.2f}' for cell in cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--job", nargs=2, metavar=("WHAT", "STARTED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        what, started = options.job
        ends = {"bare": bare, "whole": whole}[what](float(started))
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_rank() == 0:
            print("ends", *ends, flush=True)
        return
    from machine import machine

    print(machine())
    head = ("processes", "imports, s", "to the first exchange, s", "ratio", *PARTS)
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}", flush=True)
    for processes in options.processes:
        print(measure(processes, options.rounds), flush=True)


if __name__ == "__main__":
    sys.exit(main())
