"""Measures the cost of on_failure="shrink", and the time to continue after a death.

    mpirun --with-ft ulfm -n 3 python bench/shrink.py [--megabytes 40] [--pairs 9]
    mpirun --with-ft ulfm -n 6 python bench/shrink.py --deaths

Needs Open MPI 5, see "Continue without a node" in docs/guides/faults.md. The first command measures
the mean over all nodes in pairs, with an exchange that ends all processes when one dies and with
one that continues. In the second command the last process dies, either before a mean or while it
takes part. The script prints the seconds until the other processes have their mean without it. Then
the next process dies, until two are left.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import threading
import time

from machine import machine, own_core

os.environ.setdefault("NPROC", "16")
own_core()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jdaso  # noqa: E402

LATER_SECONDS = 0.02


def mean_of(exchange, comm, tree, begin=lambda: None):
    """Returns the seconds until all processes have the mean, its first number, and their comm."""
    comm.Barrier()
    start = time.monotonic()
    begin()
    mean = jax.block_until_ready(jdaso.consensus(exchange, tree))
    took = time.monotonic() - start
    now = exchange.topology()
    comm = comm if now is None else now.comm
    return max(comm.allgather(took)), float(mean[0]), comm


def cost(topology, tree, pairs, say):
    """Prints the times of means with and without an agreement at the end."""
    exchanges = [jdaso.mpi_exchange(topology, on_failure=name) for name in ("stop", "shrink")]
    say("| mean of | stop | shrink | ratio (median, range of pairs) |\n|---|---|---|---|")
    for name, given in (("one number", tree[:1]), (f"{tree.nbytes / 1e6:g} MB", tree)):
        both = [
            [mean_of(exchange, topology.comm, given)[0] for exchange in exchanges]
            for _ in range(pairs + 1)
        ]
        ratios = [shrink / stop for stop, shrink in both[1:]]
        stop, shrink = (1e3 * statistics.median(times) for times in zip(*both[1:], strict=True))
        say(
            f"| {name} | {stop:.2f} ms | {shrink:.2f} ms | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f}..{max(ratios):.2f}) |"
        )


def deaths(topology, tree, say):
    """Prints the times of means during which the last process dies."""
    exchange = jdaso.mpi_exchange(topology, on_failure="shrink")
    comm = topology.comm
    usual = statistics.median(mean_of(exchange, comm, tree)[0] for _ in range(5))
    say(f"without a death: {usual:.3f} s")
    say("| process that dies | left | seconds until they have their mean |\n|---|---|---|")
    for last in range(topology.num_nodes - 1, 1, -1):
        takes_part = last % 2 == 0

        def kill(last=last, takes_part=takes_part):
            if topology.rank == last:
                seconds = LATER_SECONDS if takes_part else 0
                threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
                if not takes_part:
                    time.sleep(60)

        took, mean, comm = mean_of(exchange, comm, tree, kill)
        # All numbers of node r are r + 1.
        assert mean == (last + 1) / 2, f"{mean} is not the mean of {last} nodes"
        when = "taking part" if takes_part else "at once"
        say(f"| rank {last}, {when} | {last} | {took:.3f} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=40, help="of a mean")
    parser.add_argument("--pairs", type=int, default=9, help="pairs of means")
    parser.add_argument("--deaths", action="store_true", help="let one process after the other die")
    options = parser.parse_args()
    topology = jdaso.discover_topology(processes_per_node=1)
    if topology.num_nodes < 3:
        sys.exit(
            f"bench/shrink.py needs at least 3 processes, got {topology.num_nodes}: one dies, and "
            "two continue."
        )
    tree = jnp.full(int(options.megabytes * 250_000), 1.0 + topology.rank)
    say = print if topology.rank == 0 else lambda *_: None
    say(f"{machine()}; {topology.num_nodes} processes")
    if options.deaths:
        deaths(topology, tree, say)
    else:
        cost(topology, tree, options.pairs, say)


if __name__ == "__main__":
    main()
