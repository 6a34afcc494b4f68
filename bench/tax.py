"""Measures what jdaso adds to a training step: time, and temporary device memory.

    mpiexec -n 2 python bench/tax.py [--leaves 40] [--heap default] [--devices 2] [--sharded]
                                     [--chain] [--only NAME ...]
    mpiexec -n 2 python bench/tax.py --compile --leaves 300
    python bench/tax.py --table         all tables of bench/README.md, in about 17 minutes

Each process trains on one core by SGD with momentum. The gradients are arguments of the step, so
the baseline is the optimizer alone. Steps at which nothing is due, steps that post an exchange and
steps that merge one are measured separately. Nothing else happens on the network meanwhile. A pair
is a step without and a step with jdaso. The tables have medians of the pairs' differences on the
first node. Their unit is the time of copying (memcpy) the parameters of all devices of a node.
Temporary memory of the compiled step is in units of the parameters of one device.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import jax
import mpi_job
import pairs
from jax.sharding import PartitionSpec as P
from machine import keep_memory, machine, own_core

import jdaso

FEW = ("daso, guard off", "daso", "daso, 4 fragments", "easgd", "diloco")
THREE = ("daso, guard off", "daso", "diloco")
# The jobs of --table, with the algorithms that they measure. None stands for all.
TABLE = (
    ("--leaves 40 --heap kept", None),
    ("--leaves 40 --heap default", None),
    ("--leaves 400 --heap kept", FEW),
    ("--leaves 400 --heap default", THREE),
    ("--devices 2", THREE),
    ("--devices 2 --sharded", THREE),
    ("--devices 4", THREE),
    ("--devices 4 --sharded", THREE),
    ("--chain", FEW),
    ("--compile --leaves 300", ("daso", "daso, int8", "daso, 4 fragments", "easgd", "diloco")),
)
JOB_SECONDS = 300


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=16, help="size of the parameters")
    parser.add_argument("--leaves", type=int, default=40, help="number of leaves")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices of a node")
    parser.add_argument("--sharded", action="store_true", help="shard two leaves of three")
    parser.add_argument("--heap", choices=("kept", "default"), default="kept")
    parser.add_argument("--chain", action="store_true", help="tx.update and optax.apply_updates")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these cases")
    parser.add_argument("--native", action="store_true", help="compiled code, also on a GPU")
    parser.add_argument("--compile", action="store_true", help="measure the time of compiling")
    parser.add_argument("--repeat", type=int, default=3, help="pairs of compilations")
    parser.add_argument("--table", action="store_true", help="run all jobs of the tables")
    return parser.parse_args()


def print_tables(arguments):
    """Runs the jobs of the tables, one after the other."""
    start, failed = time.monotonic(), False
    print(machine())
    for options, only in TABLE:
        only = arguments.only or only
        command = [__file__, *options.split(), "--megabytes", arguments.megabytes]
        command += ["--pairs", arguments.pairs, "--repeat", arguments.repeat]
        job = mpi_job.run(2, JOB_SECONDS, *command, *(["--only", *only] if only else []))
        # The machine is the same for all of them.
        print("\n" + "".join(job.stdout.splitlines(keepends=True)[1:]), end="", flush=True)
        if job.problem is not None:
            failed = True
            print(f"\n`{options}` failed: {job.problem}", flush=True)
            print(job.stderr, file=sys.stderr)
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes")
    return int(failed)


class Measurement:
    """Trains with jdaso and without it.

    Args:
        arguments: of the command line.
    """

    def __init__(self, arguments):
        self._arguments = arguments
        self.topology = jdaso.discover_topology(processes_per_node=1)
        specs = [P(), P("local"), P(None, "local")] if arguments.sharded else [P()]
        self.params, self._shardings = pairs.make_params(
            arguments.megabytes, arguments.leaves, self.topology.mesh, specs
        )

    def plain(self, leaves=None):
        """Training without jdaso, of the first leaves."""
        return pairs.Training(pairs.SGD, self.params[:leaves])

    def trained(self, name, leaves=None):
        """An exchange, and training with it."""
        exchange = jdaso.mpi_exchange(
            self.topology,
            shardings=self._shardings[:leaves],
            native=True if self._arguments.native else None,
        )
        tx = jdaso.chain(pairs.SGD, pairs.cases(exchange)[name])
        return exchange, pairs.Training(tx, self.params[:leaves], self._arguments.chain)

    def compiling(self, name, leaves=None):
        """Seconds of tracing and compiling without and with jdaso."""
        exchange, trained = self.trained(name, leaves)
        exchange.close()
        return self.plain(leaves).compile_seconds, trained.compile_seconds


def compile_table(measurement, names, repeat, say):
    say(pairs.header("", "plain optax, s", "added, s", "range"))
    for name in names:
        measurement.compiling(name, leaves=4)  # traces what all programs have in common
        found = [measurement.compiling(name) for _ in range(repeat)]
        added = [after - before for before, after in found]
        alone = statistics.median(before for before, _ in found)
        cells = f"{alone:.1f}", f"{statistics.median(added):.1f}"
        say(pairs.row(name, *cells, f"{min(added):.1f}..{max(added):.1f}"), flush=True)


def step_table(measurement, names, count, copy, say):
    plain, size = measurement.plain(), pairs.device_bytes(measurement.params)
    # Processes that share an accelerator take turns.
    topology = measurement.topology
    turn = None if topology.devices[0].platform == "cpu" else topology.rank
    say(pairs.header("", "nothing due", "quartiles", "posts", "merges", "temporary"))
    for name in names:
        exchange, trained = measurement.trained(name)
        extra = pairs.measure(exchange, plain, trained, count, turn)
        cells = pairs.in_copies(extra, copy)
        say(pairs.row(name, *cells, f"{trained.temporary / size:.2f}"), flush=True)
        exchange.close()


def main():
    arguments = parse()
    if arguments.table:
        return print_tables(arguments)
    names = arguments.only or pairs.CASES
    if unknown := set(names) - set(pairs.CASES):
        sys.exit(f"unknown: {', '.join(unknown)}; there are {', '.join(pairs.CASES)}.")
    if not arguments.native:
        own_core()
    if arguments.heap == "kept":
        keep_memory()
    jax.config.update("jax_enable_compilation_cache", False)
    if arguments.devices > 1:
        jdaso.cluster.use_virtual_devices(arguments.devices)
    measurement = Measurement(arguments)
    topology, copy = measurement.topology, pairs.copy_seconds(measurement.params)
    say = print if topology.rank == 0 else lambda *text, **options: None
    say(machine())
    say(
        f"{topology.num_nodes} processes, {arguments.megabytes:g} MB in {arguments.leaves} leaves, "
        f"{arguments.devices} {topology.devices[0].platform} devices, "
        f"{'sharded' if arguments.sharded else 'replicated'}, {arguments.heap} heap, "
        f"{'chain' if arguments.chain else 'apply_gradients'}; a copy takes {1e3 * copy:.2f} ms; "
        f"{pairs.ABOUT}\n"
    )
    if arguments.compile:
        compile_table(measurement, names, arguments.repeat, say)
    else:
        step_table(measurement, names, arguments.pairs, copy, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
