"""Measures what jdaso adds to a training step: time, and temporary device memory.

    mpiexec -n 2 python bench/tax.py [--leaves 40] [--heap default] [--devices 2] [--sharded]
                                     [--chain] [--only NAME ...]
    mpiexec -n 2 python bench/tax.py layouts --devices 4 --leaves 30
    mpiexec -n 2 python bench/tax.py compile --leaves 300
    python bench/tax.py network --megabytes 100
    python bench/tax.py all         the tables of these commands, one after the other

Each process trains on one core by SGD with momentum. The gradients are arguments of the step, so
the baseline is the optimizer alone. Steps at which nothing is due, steps that post an exchange and
steps that merge one are measured separately. Nothing else happens on the network meanwhile. A pair
is a step without and a step with jdaso. The tables have medians of the pairs' differences on the
first node. Their unit is the time of copying (memcpy) the parameters of all devices of a node.
Temporary memory of the compiled step is in units of the parameters of one device.

- layouts: the same for parameters that are replicated or sharded over the devices of a node, under
  jit and inside a ``shard_map`` of the user, with the number of all-gathers and of Python callbacks
  in the compiled step.
- compile: the time of tracing and compiling.
- network: the ratio for a whole step of a network of dense layers, on one process. 4096 rows need
  as many operations per parameter as 25 images of 224 x 224 pixels need in ResNet-50. No exchange
  is due.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import re
import statistics
import sys
import time

if sys.argv[1:2] != ["network"]:  # which computes on all cores; other processes have one
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import mpi_job
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from machine import header, keep_memory, machine, own_core, row
from step import SGD, Training, apply_gradients, copy_seconds, device_bytes, make_params, timed

import jdaso

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
LONGEST_WAIT = 0.5  # seconds until a transfer has ended
WARM_UP = 12  # pairs; the first steps touch new memory
ABOUT = "diloco without a warm-up"
FEW = ("daso, guard off", "daso", "daso, 4 fragments", "easgd", "diloco")
THREE = ("daso, guard off", "daso", "diloco")
# The jobs of "all", with the algorithms that they measure. None stands for all.
JOBS = (
    ("steps --leaves 40 --heap kept", None),
    ("steps --leaves 40 --heap default", None),
    ("steps --leaves 400 --heap kept", FEW),
    ("steps --leaves 400 --heap default", THREE),
    ("steps --devices 2", THREE),
    ("steps --devices 2 --sharded", THREE),
    ("steps --devices 4", THREE),
    ("steps --devices 4 --sharded", THREE),
    ("steps --chain", FEW),
    ("layouts --devices 2 --leaves 30 --pairs 24", ("daso",)),
    ("layouts --devices 4 --leaves 30 --pairs 24", ("daso",)),
    ("compile --leaves 300", ("daso", "daso, int8", "daso, 4 fragments", "easgd", "diloco")),
)
JOB_SECONDS = 300
# Number of devices -> shapes of the mesh, with the layouts of three leaves.
ONE_AXIS = [P(), P("x"), P(None, "x")]
TWO_AXES = [P(), P("y", "x"), P(None, ("x", "y"))]
LAYOUTS = {
    2: [((2,), [P()]), ((2,), ONE_AXIS)],
    4: [((4,), [P()]), ((4,), ONE_AXIS), ((2, 2), TWO_AXES)],
}
DENSE_LAYERS = 10


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = [*TABLES, "network", "all"]
    parser.add_argument("part", nargs="?", choices=parts, default="steps")
    parser.add_argument("--megabytes", type=float, default=16, help="size of the parameters")
    parser.add_argument("--leaves", type=int, default=40, help="number of leaves")
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices of a node")
    parser.add_argument("--sharded", action="store_true", help="shard two leaves of three")
    parser.add_argument("--heap", choices=("kept", "default"), default="kept")
    parser.add_argument("--chain", action="store_true", help="tx.update and optax.apply_updates")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these cases")
    parser.add_argument("--native", action="store_true", help="compiled code, also on a GPU")
    parser.add_argument("--repeat", type=int, default=3, help="pairs of compilations")
    parser.add_argument("--rows", type=int, default=4096, help="rows of a batch of the network")
    arguments = parser.parse_args()
    if unknown := set(arguments.only or ()) - set(CASES):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(CASES)}.")
    if arguments.part == "layouts" and arguments.devices not in LAYOUTS:
        parser.error(f"layouts needs --devices 2 or 4, got {arguments.devices}.")
    return arguments


# ----------------------------------------------------------- Pairs of steps, without and with jdaso


def cases(exchange):
    """By name, averagings that post at every fourth step and merge at the next one.

    Fragments are posted at every third step. Local SGD merges at the step that posts.
    """
    schedule = jdaso.constant(4, 1)
    one_by_one = jdaso.constant(12, 1)
    found = {}
    for suffix, guard in ((", guard off", "off"), ("", "skip")):
        options = {"nonfinite": guard}
        found |= {
            f"daso{suffix}": jdaso.daso(exchange, schedule=schedule, **options),
            f"dasgd{suffix}": jdaso.dasgd(exchange, 4, 1, **options),
            f"local_sgd{suffix}": jdaso.local_sgd(exchange, 4, **options),
            f"easgd{suffix}": jdaso.easgd(exchange, alpha=0.1, schedule=schedule, **options),
            f"diloco{suffix}": jdaso.diloco(exchange, 4, OUTER, 1, **options),
        }
    return found | {
        "daso, bfloat16": jdaso.daso(exchange, schedule=schedule, wire="bfloat16"),
        "daso, int8": jdaso.daso(exchange, schedule=schedule, wire="int8"),
        "daso, float4": jdaso.daso(exchange, schedule=schedule, wire="float4"),
        "daso, 4 fragments": jdaso.daso(exchange, schedule=one_by_one, fragments=4),
    }


CASES = tuple(cases(jdaso.axis_exchange("node", 2)))


class Measurement:
    """The parameters of a process, and training with jdaso and without it.

    Args:
        arguments: of the command line.
        mesh: of the devices of this node.
        specs: the leaves take turns with them.
    """

    def __init__(self, arguments, topology, mesh, specs):
        self._arguments, self.topology = arguments, topology
        sizes = arguments.megabytes, arguments.leaves
        self.params, self.shardings = make_params(*sizes, mesh, specs)
        self.copy = copy_seconds(self.params)

    def plain(self, leaves=None, **options):
        """Training without jdaso, of the first leaves."""
        return Training(SGD, self.params[:leaves], **options)

    def trained(self, name, leaves=None, **options):
        """An exchange, and training with it."""
        exchange = jdaso.mpi_exchange(
            self.topology,
            shardings=self.shardings[:leaves],
            native=True if self._arguments.native else None,
        )
        tx = jdaso.chain(SGD, cases(exchange)[name])
        return exchange, Training(tx, self.params[:leaves], self._arguments.chain, **options)

    def compiling(self, name, leaves=None):
        """Seconds of tracing and compiling without and with jdaso."""
        exchange, trained = self.trained(name, leaves)
        exchange.close()
        return self.plain(leaves).compile_seconds, trained.compile_seconds


def measure(exchange, plain, trained, pairs, turn=None):
    """Seconds that steps take more than plain ones.

    Nothing is transferred during a step. The time for which a step waits for an exchange does not
    count, except for Local SGD, which always waits.

    Args:
        turn: nodes take their steps one after the other. It is the number of this node. None if
            all nodes take them at the same time.

    Returns:
        Kind of step -> the difference of each pair. The kinds are "none", "post", "merge" and
        "postmerge".
    """
    extra = collections.defaultdict(list)
    for i in range(WARM_UP + pairs):
        first, second = (plain, trained) if i % 2 else (trained, plain)
        posted = trained.posted()
        for at in range(1 if turn is None else exchange.num_nodes):
            if turn in (None, at):
                times = {first: first.step(), second: second.step()}
            exchange.any_node(False)  # waits for the other nodes
        posts = trained.posted() > posted
        if posts:
            time.sleep(min(2 * _transfer_seconds(exchange), LONGEST_WAIT))
            exchange.any_node(False)
        if i >= WARM_UP:
            kind = "post" * posts + "merge" * trained.merged() or "none"
            waited = _waited_seconds(exchange) if kind == "merge" else 0
            extra[kind].append(times[trained] - times[plain] - waited)
    return extra


def _transfer_seconds(exchange) -> float:
    """The median of the last transfers."""
    records = exchange.history()[-5:]
    spans = [record.transfer[1] - record.transfer[0] for record in records]
    return statistics.median(spans) if spans else LONGEST_WAIT


def _waited_seconds(exchange) -> float:
    """The time for which the last merge has waited for its exchange."""
    records = exchange.history()[-1:]
    return sum(record.wait[1] - record.wait[0] for record in records)


def in_copies(extra, copy) -> list[str]:
    """Cells of a table: the median and the quartiles of steps with nothing due, and two medians."""

    def median(kind):
        return f"{statistics.median(extra[kind]) / copy:.1f}" if extra[kind] else "-"

    quartiles = "-"
    if len(extra["none"]) > 1:
        low, _, high = statistics.quantiles(extra["none"], n=4)
        quartiles = f"{low / copy:.1f}..{high / copy:.1f}"
    return [median("none"), quartiles, median("post"), median("merge")]


def all_gathers(text) -> int:
    """The number of all-gathers and all-to-alls in a compiled program."""
    return len(re.findall(r" all-(?:gather|to-all)(?:-start)?\(", text))


def host_callbacks(text) -> int:
    """The number of Python callbacks in a compiled program."""
    return len(re.findall(r'custom_call_target="[^"]*callback', text))


# ------------------------------------------------------- Tables that the processes of a job print


def step_table(arguments, topology, say):
    """Time and memory that each algorithm adds to a step."""
    specs = [P(), P("local"), P(None, "local")] if arguments.sharded else [P()]
    measurement = Measurement(arguments, topology, topology.mesh, specs)
    plain, size = measurement.plain(), device_bytes(measurement.params)
    # Processes that share an accelerator take turns.
    turn = None if topology.devices[0].platform == "cpu" else topology.rank
    say(f"a copy takes {1e3 * measurement.copy:.2f} ms; {ABOUT}\n")
    say(header("", "nothing due", "quartiles", "posts", "merges", "temporary"))
    for name in arguments.only or CASES:
        exchange, trained = measurement.trained(name)
        extra = measure(exchange, plain, trained, arguments.pairs, turn)
        cells = in_copies(extra, measurement.copy)
        say(row(name, *cells, f"{trained.temporary / size:.2f}"), flush=True)
        exchange.close()


def layout_table(arguments, topology, say):
    """The same for each layout of the parameters over the devices of a node."""
    names = ("mesh", "parameters", "under", "all-gathers", "callbacks", "temporary, bytes")
    names += ("nothing due", "quartiles", "posts", "merges")
    for case in arguments.only or ["daso"]:
        say(f"{case}; {ABOUT}\n\n{header(*names)}")
        for shape, specs in LAYOUTS[arguments.devices]:
            axes = ("x", "y")[: len(shape)]
            devices, types = np.array(topology.devices).reshape(shape), (AxisType.Auto,) * len(axes)
            mesh = Mesh(devices, axes, axis_types=types)
            measurement = Measurement(arguments, topology, mesh, specs)
            inside = inside_shard_map(mesh, [x.spec for x in measurement.shardings])
            for form, wrap in (("jit", {}), ("shard_map", {"wrap": inside})):
                exchange, trained = measurement.trained(case, **wrap)
                plain = measurement.plain(**wrap)
                extra = measure(exchange, plain, trained, arguments.pairs)
                exchange.close()
                text, layout = trained.text, "replicated" if len(specs) == 1 else "sharded"
                counts = all_gathers(text), host_callbacks(text), trained.temporary
                cells = " x ".join(map(str, shape)), layout, form, *counts
                say(row(*cells, *in_copies(extra, measurement.copy)), flush=True)


def inside_shard_map(mesh, specs):
    """Returns a function that makes a step run inside ``shard_map`` over all axes of a mesh."""

    def wrap(step, opt_state):
        state = jax.tree.map(
            lambda x: x.sharding.spec if isinstance(x.sharding, NamedSharding) else P(), opt_state
        )
        return jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, state, specs),
            out_specs=(specs, state),
            check_vma=False,
        )

    return wrap


def compile_table(arguments, topology, say):
    """Seconds of tracing and compiling."""
    measurement = Measurement(arguments, topology, topology.mesh, [P()])
    say(header("", "plain optax, s", "added, s", "range"))
    for name in arguments.only or CASES:
        measurement.compiling(name, leaves=4)  # traces what all programs have in common
        found = [measurement.compiling(name) for _ in range(arguments.repeat)]
        added = [after - before for before, after in found]
        alone = statistics.median(before for before, _ in found)
        cells = f"{alone:.1f}", f"{statistics.median(added):.1f}"
        say(row(name, *cells, f"{min(added):.1f}..{max(added):.1f}"), flush=True)


TABLES = {"steps": step_table, "layouts": layout_table, "compile": compile_table}


# ------------------------------------------------------------------------------- Of one process


def network_table(arguments):
    """Seconds of a step of a network of dense layers, without and with jdaso."""
    width = round((arguments.megabytes * 250_000 / DENSE_LAYERS) ** 0.5)
    keys = jax.random.split(jax.random.key(0), DENSE_LAYERS)
    params = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys]
    batch = jax.random.normal(jax.random.key(1), (arguments.rows, width))

    def loss_fn(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    def prepare(tx):
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, batch):
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            return apply_gradients(tx, grads, opt_state, params, value=loss)

        run = timed(step, [jax.tree.map(jnp.copy, params), tx.init(params)], batch)
        run(2)
        return run

    # No run reaches the end of this period.
    averaging = jdaso.daso(jdaso.single_exchange(), period=10**6, delay=1)
    runs = prepare(SGD), prepare(jdaso.chain(SGD, averaging))
    found = []
    for i in range(arguments.pairs):
        order = (0, 1) if i % 2 else (1, 0)
        seconds = {which: runs[which](1) for which in order}
        found.append((seconds[0], seconds[1]))
    ratios = [after / before for before, after in found]
    before, after = (1e3 * statistics.median(times) for times in zip(*found, strict=True))
    print(f"{DENSE_LAYERS * width**2 / 1e6:.1f} M float32 parameters, {arguments.rows} rows\n")
    print(header("without `jdaso.daso`", "with", "ratio (median, range of pairs)"))
    between = f"({min(ratios):.3f}..{max(ratios):.3f})"
    print(row(f"{before:.1f} ms", f"{after:.1f} ms", f"{statistics.median(ratios):.3f} {between}"))


def all_tables(arguments):
    """Runs the jobs of the tables, one after the other."""
    start, failed = time.monotonic(), False
    print(machine())
    for options, only in JOBS:
        only = arguments.only or only
        part, *options = options.split()
        command = [__file__, part, "--megabytes", arguments.megabytes, "--pairs", arguments.pairs]
        command += ["--repeat", arguments.repeat, *options, *(["--only", *only] if only else [])]
        job = mpi_job.run(2, JOB_SECONDS, *command)
        # The machine is the same for all of them.
        print("\n" + "".join(job.stdout.splitlines(keepends=True)[1:]), end="", flush=True)
        if job.problem is not None:
            failed = True
            print(f"\n`{part} {' '.join(options)}` failed: {job.problem}", flush=True)
            print(job.stderr, file=sys.stderr)
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes")
    return int(failed)


def main():
    arguments = parse()
    if arguments.part == "all":
        return all_tables(arguments)
    if arguments.heap == "kept":
        keep_memory()
    if arguments.part == "network":
        print(machine())
        return network_table(arguments)
    if not arguments.native:
        own_core()
    jax.config.update("jax_enable_compilation_cache", False)
    if arguments.devices > 1:
        jdaso.cluster.use_virtual_devices(arguments.devices)
    topology = jdaso.discover_topology(processes_per_node=1)
    say = print if topology.rank == 0 else lambda *text, **options: None
    say(machine())
    say(
        f"{topology.num_nodes} processes, {arguments.megabytes:g} MB in {arguments.leaves} leaves, "
        f"{arguments.devices} {topology.devices[0].platform} devices, "
        f"{'sharded' if arguments.sharded else 'replicated'}, {arguments.heap} heap, "
        f"{'chain' if arguments.chain else 'apply_gradients'}\n"
    )
    return TABLES[arguments.part](arguments, topology, say)


if __name__ == "__main__":
    sys.exit(main())
