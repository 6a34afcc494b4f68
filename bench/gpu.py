"""Measures everything that only a GPU can show, in one command, within 10 minutes.

    python bench/gpu.py [--sections parity copies ...] > report.md

The report is Markdown. Each section is a job of one or two processes on one device, with a time
limit. A section that fails is a row with its message, and the others still run. On a machine
without a GPU all sections run on CPU devices with small sizes, and the report says what it skips.
No network is needed. The last two sections take longer, and run only with ``--sections``.

- parity: compiled code (``native=True``) and host callbacks give the same bits.
- copies: the speed of post and collect, without messages, beside that of JAX's own copies to and
  from pinned memory. They are also checked, on one device, and on all that a process sees.
- sanitizer: the same under compute-sanitizer, which finds invalid accesses to memory.
- idle: steps of tiny parameters where nothing is due. They take longer than those without jdaso by
  the time for which the device has nothing to do because the host waits for it.
- forms: a step where nothing is due, with loops and with conditionals, without and with XLA's
  region analysis: its time, its memory, and the copies in the program.
- ends: processes exit, or one is killed, while an exchange is in flight.
- tax: the table of bench/tax.py. The two processes take their steps in turn.
- resnet: the step of ResNet-50 with and without an exchange in flight. The second process computes
  no gradients, so the first one has the device nearly to itself. Most of the time is compiling.
- shared: the same, but both processes train on the device.

On a GPU have run, with older versions of the library: parity, tax, resnet and shared, on one H200.
The code for CUDA devices in parity and copies runs in the tests with a simulated driver. The other
sections have run on CPU devices only.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "tests" / "support"
sys.path += [str(HERE.parent / "examples" / "papers"), str(SUPPORT)]
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")  # a process has one core

import deviceless  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import mpi_job  # noqa: E402
import numpy as np  # noqa: E402
import one_process  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import Mesh, PartitionSpec, SingleDeviceSharding  # noqa: E402
from machine import header, machine, row  # noqa: E402
from mpi_job import UNNOTICED  # noqa: E402
from step import (  # noqa: E402
    SGD,
    ReportTotals,
    Training,
    apply_gradients,
    copy_seconds,
    device_bytes,
    held_bytes,
    make_params,
    make_step,
    matmuls_for,
    ratio_cells,
    settle,
)

import jdaso  # noqa: E402
from jdaso.exchange.host import slots  # noqa: E402
from jdaso.exchange.host.layout import Shardings  # noqa: E402
from jdaso.exchange.host.program import Program, ProgramLeaves  # noqa: E402

# Seconds of each section, at most. The first seven take less than 10 minutes.
LIMITS = {"parity": 100, "copies": 50, "sanitizer": 60, "idle": 50, "forms": 80, "ends": 80}
LIMITS |= {"tax": 130, "resnet": 600, "shared": 600}
DEFAULT = [*LIMITS][:7]
# The library allocates device memory next to XLA's, and the two processes share the device.
MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}
PROBE = "import jax; d = jax.local_devices(); print(d[0].platform, len(d), d[0].device_kind)"
# Options of tests/support/children/native.py, which compares the bits after every step.
PARITY = {
    "float32": (),
    "bfloat16, 3 fragments": ("--wire", "bfloat16", "--fragments", "3"),
    "int8": ("--wire", "int8"),
    "leaves of all dtypes": ("--dtypes", "float8_e4m3fn", "float16", "bfloat16", "float32"),
}
TAX = ("daso, guard off", "daso", "daso, bfloat16", "daso, int8", "daso, 4 fragments")
TAX += ("dasgd", "easgd", "diloco")
TINY = "tiny"  # a network for a machine without a GPU, which compiles in seconds


# ------------------------------------------------------------------------------------- The report


def print_part(part, processes, small, large, arguments, on_gpu, seconds):
    """Runs a function of this file in a job, with options of its size, and prints its table."""
    names = "model", "batch", "image", "steps", "pairs"
    given = [text for name in names for text in (f"--{name}", getattr(arguments, name))]
    options = [*given, *large.split()] if on_gpu else small.split()
    job = mpi_job.run(processes, seconds, __file__, "--part", part, *options, **MEMORY)
    print(job.stdout, end="")
    return job


def print_parity(arguments, on_gpu, seconds):
    """Compares compiled code with host callbacks, and prints a row for each set of options."""
    chosen = PARITY if on_gpu else {name: PARITY[name] for name in ("float32", "int8")}
    with tempfile.TemporaryDirectory() as folder:
        program = [
            [name, "native.py", [*options, "--callbacks", folder], True]
            for name, options in chosen.items()
        ]
        batch = SUPPORT / "children" / "batch.py"
        job = mpi_job.run(2, seconds, batch, json.dumps(program), **MEMORY)
    kind = "CUDA" if on_gpu else "CPU"
    print(header("wire", f"compiled code for {kind} and host callbacks, 30 steps"))
    for name in chosen:
        errors = [x for x in job.stdout.splitlines() if x.startswith(f"[{name}] raised")]
        result = "not reached"
        if errors:
            result = errors[0].removeprefix(f"[{name}] raised ").replace("|", "\\|")[:300]
        elif job.stdout.count(f"[{name}] passed") == 2:
            result = "the same bits"
        print(row(name, result))
    return job


def print_sanitizer(arguments, on_gpu, seconds):
    if not on_gpu or shutil.which("compute-sanitizer") is None:
        why = "compute-sanitizer is not on PATH" if on_gpu else "there is no GPU"
        print(f"Skipped, because {why}.")
        return mpi_job.Job("", "", None)
    return print_part("sanitizer", 1, "", "--megabytes 1", arguments, on_gpu, seconds)


def print_ends(arguments, on_gpu, seconds):
    """Ends jobs with an exchange in flight, and says whether all processes end."""
    print(header("a job of two processes", "result"))
    problem = None
    for part, case in (("exit", "both exit"), ("death", "one is killed")):
        options = "--part", part, "--megabytes", 256 if on_gpu else 4
        job = mpi_job.run(2, seconds / 2, __file__, *options, **MEMORY)
        result = job.problem or "status 0"
        if part == "death" and result.startswith("status") and "has died" in job.stderr:
            result, job = "the other one says so and ends", job._replace(problem=None)
        print(row(case, result))
        problem = problem or job.problem
    return job._replace(problem=problem)


def print_tax(arguments, on_gpu, seconds):
    """Runs bench/tax.py with compiled code."""
    size = ["--megabytes", 256, "--pairs", 36] if on_gpu else ["--megabytes", 1, "--pairs", 8]
    names = TAX if on_gpu else TAX[1:2]
    command = [HERE / "tax.py", *size, "--native", "--only", *names]
    job = mpi_job.run(2, seconds, *command, **MEMORY)
    print(job.stdout, end="")
    return job


SMALL = f"--model {TINY} --batch 2 --image 8 --steps 4 --pairs 2"
SECTIONS = {
    "parity": print_parity,
    "copies": functools.partial(print_part, "copies", 1, "--megabytes 4", "--megabytes 256"),
    "sanitizer": print_sanitizer,
    "idle": functools.partial(print_part, "idle", 1, "", ""),
    "forms": functools.partial(print_part, "forms", 1, "--megabytes 1", "--megabytes 256"),
    "ends": print_ends,
    "tax": print_tax,
    "resnet": functools.partial(print_part, "resnet", 2, SMALL, ""),
    "shared": functools.partial(print_part, "shared", 2, SMALL, ""),
}


def report(arguments):
    """Prints the report. Returns the number of sections that failed."""
    start = time.monotonic()
    probe = mpi_job.run(1, 40, "-c", PROBE, **MEMORY)
    on_gpu = probe.stdout.split()[:1] == ["gpu"]
    print(f"# What only a GPU can show\n\n{machine()}  ")
    print(f"JAX's devices: {probe.problem or probe.stdout.strip()}\n")
    if probe.problem is not None:
        MEMORY["JAX_PLATFORMS"] = "cpu"
    if not on_gpu:
        print(
            "Skipped, because JAX finds no GPU: the copies for CUDA devices, times on a GPU, and "
            "ResNet-50. The sections below ran on CPU devices with small sizes.\n"
        )
    ended = {}
    for section in arguments.sections:
        print(f"## {section}\n", flush=True)
        since = time.monotonic()
        try:
            job = SECTIONS[section](arguments, on_gpu, arguments.limit or LIMITS[section])
            problem = job.problem
            if problem is not None:
                print(job.stderr, file=sys.stderr)
        except Exception as error:  # the other sections shall run
            problem = f"{type(error).__name__}: {error}"
        ended[section] = problem, time.monotonic() - since
        print(flush=True)
    print(f"## sections\n\n{header('section', 'seconds', 'result')}")
    for section, (problem, seconds) in ended.items():
        print(row(section, f"{seconds:.0f}", problem or "complete"))
    print(f"\n{(time.monotonic() - start) / 60:.1f} minutes")
    return sum(problem is not None for problem, _ in ended.values())


# --------------------------------------------------------------- The parts, which run in the jobs


def copies(arguments):
    """Posts and collects in one process, so that no message delays a copy."""
    jax.config.update("jax_num_cpu_devices", 2)
    if arguments.stand_in:
        one_process.use_stand_in(arguments.stand_in, 2)
    devices = jax.local_devices()
    slots.use_native(True, devices)
    layouts = {"1 device": (devices[:1], PartitionSpec())}
    several = f"{len(devices)} devices"
    if len(devices) > 1:
        layouts[f"{several}, replicated"] = devices, PartitionSpec()
        layouts[f"{several}, sharded"] = devices, PartitionSpec(None, "local")
    print(f"{arguments.megabytes:g} MB of float32 in 40 leaves, GB/s\n")
    print(header("", "post", "JAX's copy to the host", "collect", "JAX's copy from the host", ""))
    for name, (chosen, spec) in layouts.items():
        mesh = Mesh(np.array(chosen), ("local",))
        params, _ = make_params(arguments.megabytes, 40, mesh, [spec])
        right, post, collect = post_and_collect(params, mesh, spec)
        rates = post, pinned_rate(params, True), collect, pinned_rate(params, False)
        result = "the same numbers" if right else "WRONG NUMBERS"
        print(row(name, *(f"{rate / 1e9:.1f}" for rate in rates), result), flush=True)
        if not right:
            sys.exit(f"WrongNumbersError: {name}")
    if len(devices) == 1:
        print("\nSeveral devices of one process were skipped, because there is one.")


def post_and_collect(params, mesh, spec, rounds=9):
    """Whether what is collected is what was posted, and bytes per second of both."""
    table = one_process.served_table()
    program = Program(table, True, Shardings(spec, mesh), contextlib.nullcontext)
    program.register(params)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]

    @jax.jit
    def step(number, leaves):
        leaves = [x + number for x in leaves]
        bound = ProgramLeaves(program, names, leaves)
        token, _ = bound.post(
            jnp.int32(0), number, 0, leaves, jnp.asarray(one_process.HEADER), None
        )
        sums, *_ = bound.collect(token, number, leaves)
        return jnp.stack([jnp.all(x == y) for x, y in zip(leaves, sums, strict=True)]).all()

    right = all([bool(step(number, params)) for number in range(rounds)])
    program.close()
    records = table.records()[2:]  # the first ones touch new memory
    size = sum(x.nbytes for x in params)

    def rate(nbytes, spans):
        return nbytes / statistics.median(end - start for start, end in spans)

    to_host = rate(size, [record.copy_to_host for record in records])
    return right, to_host, rate(held_bytes(params), [r.copy_to_device for r in records])


def pinned_rate(params, to_host):
    """Bytes per second of JAX's copy of as many bytes between a device and pinned memory."""
    device = next(iter(params[0].devices()))
    here = SingleDeviceSharding(device)
    there = here.with_memory_kind("pinned_host")
    source, target = (here, there) if to_host else (there, here)
    x = jax.device_put(np.ones(sum(x.size for x in params), np.float32), source)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        jax.device_put(x, target).block_until_ready()
        times.append(time.perf_counter() - start)
    return x.nbytes / statistics.median(times[2:])


def sanitizer(arguments):
    """Runs ``copies`` under compute-sanitizer, whose summary is the last line."""
    tool = "compute-sanitizer", "--error-exitcode", "9"
    size = "--megabytes", f"{arguments.megabytes:g}"
    os.execvp(tool[0], [*tool, sys.executable, __file__, "--part", "copies", *size])


def timed(step, state, *inputs):
    """A function that takes steps and returns (seconds, seconds until dispatched) of one."""

    def run(steps):
        start = time.perf_counter()
        for _ in range(steps):
            state[:] = step(*state, *inputs)[:2]
        dispatched = time.perf_counter() - start
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / steps, dispatched / steps

    return run


def own_nodes():
    """Each process is a node, and both share the device. Returns topology and communicator."""
    topology = jdaso.discover_topology(processes_per_node=1)
    return topology, topology.comm.Dup()


def without_messages():
    """The mesh of one device, an exchange that must send nothing, and SGD with DASO."""
    mesh = Mesh(np.array(jax.local_devices()[:1]), ("local",))
    exchange = deviceless.exchange(mesh, native=True)
    return mesh, exchange, jdaso.chain(SGD, jdaso.daso(exchange, 1 << 20, 1))


def idle(arguments):
    """Steps of tiny parameters, which differ by what the device waits for the host."""
    params, (*_, tx) = [jnp.ones(100)] * 4, without_messages()
    print("Milliseconds of a step, medians\n")
    columns = "computing", "without jdaso", "nothing due", "difference"
    print(header(*columns, "dispatched after: without", "nothing due"))
    for seconds in (0, 1e-3, 1e-2):
        matmuls = matmuls_for(seconds) if seconds else 0
        runs = [
            timed(make_step(tx, matmuls), [[*map(jnp.copy, params)], tx.init(params)])
            for tx in (SGD, tx)
        ]
        found = [[run(50) for run in runs] for _ in range(8)][1:]
        steps, ends = (
            [1e3 * statistics.median(pair[i][j] for pair in found) for i in (0, 1)] for j in (0, 1)
        )
        times = *steps, steps[1] - steps[0], *ends
        print(row(f"{1e3 * seconds:g}", *(f"{x:.3f}" for x in times)), flush=True)


def forms(arguments):
    """Steps with nothing due, in loops and conditionals, without and with region analysis."""
    mesh, exchange, tx = without_messages()
    params, _ = make_params(arguments.megabytes, 40, mesh, [PartitionSpec()])
    copy, size = copy_seconds(params), device_bytes(params)
    plain = Training(SGD, params)
    size_of = f"{arguments.megabytes:g} MB in 40 leaves, one device"
    print(f"{size_of}; in copies of the parameters, which take {1e3 * copy:.2f} ms\n")

    def cells(training):
        sizes = (f"{nbytes / size:.2f}" for nbytes in (training.temporary, training.peak))
        return *sizes, len(re.findall(r" copy(?:-start)?\(", training.text))

    print(header("", "nothing due", "temporary", "peak", "copies in the program"))
    print(row("without jdaso", "-", *cells(plain)))
    options = (None, deviceless.REGION_ANALYSIS)[: 1 + (jax.default_backend() == "gpu")]
    for form, platform in (("loops", "gpu"), ("conditionals", "cpu")):
        for option in options:
            with mock.patch.object(type(exchange), "platform", platform):
                trained = Training(tx, params, options=option)
            times = [(plain.step(), trained.step()) for _ in range(24)][4:]
            extra = statistics.median(after - before for before, after in times) / copy
            name = f"{form}, region analysis" if option else form
            print(row(name, f"{extra:.1f}", *cells(trained)), flush=True)


def end_in_flight(arguments):
    """Posts, and exits or kills the second process while that exchange is in flight."""
    if arguments.part == "death" and "JDASO_UNNOTICED" not in os.environ:
        # The launcher must not see the death. It would end the other process before it says a word.
        os.environ["JDASO_UNNOTICED"] = "1"
        os.execvp("sh", [*UNNOTICED, sys.executable, *sys.argv])
    topology, _ = own_nodes()
    exchange = jdaso.mpi_exchange(topology)
    params, _ = make_params(arguments.megabytes, 40, topology.mesh, [PartitionSpec()])
    training = Training(jdaso.chain(SGD, jdaso.dasgd(exchange, 4, 3)), params)
    for _ in range(4):  # the last one posts
        training.dispatch()
    if arguments.part == "exit":
        return
    if topology.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        training.step()


class Model:
    """A residual network, random images, and its training step."""

    def __init__(self, arguments, topology):
        if arguments.model == TINY:
            block, rngs = models.BasicBlock, nnx.Rngs(0)
            model = models.ResNet(block, (1,), 8, False, 3, 1000, jnp.float32, rngs)
        else:
            model = models.create(arguments.model, 3, 1000, seed=0, dtype=jnp.bfloat16)
        self._graphdef, self.params, self._stats = nnx.split(model, nnx.Param, nnx.BatchStat)
        shape = (arguments.batch, arguments.image, arguments.image, 3)
        images = jax.random.randint(jax.random.key(0), shape, 0, 256).astype(jnp.uint8)
        labels = jnp.arange(arguments.batch) % 1000
        self._batch = images, labels
        self._value_and_grad = jdaso.local_value_and_grad(self._loss, topology.mesh)

    def _loss(self, params, images, labels):
        model = nnx.merge(self._graphdef, params, self._stats, copy=True)
        logits = model(images, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def prepare(self, tx, computes):
        """Compiles a step with or without gradients. Returns what :func:`timed` returns."""

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, batch):
            if computes:
                _, grads = self._value_and_grad(params, *batch)
            else:
                grads = jax.tree.map(jnp.zeros_like, params)
            return apply_gradients(tx, grads, opt_state, params)

        state = [jax.tree.map(jnp.copy, self.params), tx.init(self.params)]
        return timed(step, state, self._batch)


def train(arguments):
    """Measures steps with and without an exchange in flight."""
    topology, comm = own_nodes()
    say = print if topology.rank == 0 else lambda *_, **__: None
    model, steps = Model(arguments, topology), arguments.steps
    computes = topology.rank == 0 or arguments.part == "shared"
    local = SGD if computes else optax.set_to_zero()
    exchange = jdaso.mpi_exchange(topology)
    averaging = jdaso.daso(exchange, steps, steps - 1)
    alone = model.prepare(local, computes)
    within = model.prepare(jdaso.chain(local, averaging), computes)
    alone(2), within(2 * steps)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(model.params))
    say(
        f"{arguments.model}, batch {arguments.batch}, {arguments.image} x {arguments.image} "
        f"pixels, {nbytes / 1e6:.0f} MB of parameters; daso, period {steps}, delay "
        f"{steps - 1}; {arguments.pairs} pairs of {steps} steps\n"
    )
    columns = "alone, ms", "with, ms", "ratio", "range", "dispatched after, ms: alone", "with"
    say(header(*columns, "blocked, ms per exchange"), flush=True)
    totals, found = ReportTotals(exchange), []
    for _ in range(arguments.pairs):
        settle(exchange)
        comm.Barrier()
        base = alone(steps) if computes else None
        comm.Barrier()
        with totals:
            found.append((base, within(steps)))
    blocked = 1e3 * max(comm.allgather(totals.per_exchange("seconds_blocked")))
    exchange.close()
    if topology.rank == 0:
        times = [
            f"{1e3 * statistics.median(pair[i][j] for pair in found):.1f}"
            for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))
        ]
        cells = ratio_cells([(base[0], both[0]) for base, both in found])
        say(row(*times[:2], *cells, *times[2:], f"{blocked:.1f}"), flush=True)


PARTS = {"copies": copies, "sanitizer": sanitizer, "idle": idle, "forms": forms}
PARTS |= {"exit": end_in_flight, "death": end_in_flight, "resnet": train, "shared": train}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sections", nargs="+", choices=LIMITS, default=DEFAULT)
    names = [*models.IMAGE_SIZE, TINY]
    parser.add_argument("--model", choices=names, default="resnet50", help="on a GPU")
    parser.add_argument("--batch", type=int, default=64, help="images of a step on a GPU")
    parser.add_argument("--image", type=int, default=224, help="pixels of a side on a GPU")
    parser.add_argument("--steps", type=int, default=8, help="steps of a run and of a period")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs")
    parser.add_argument("--limit", type=float, help="seconds of each section, at most")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--megabytes", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--stand-in", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        PARTS[arguments.part](arguments)
        return 0
    return min(report(arguments), 1)


if __name__ == "__main__":
    sys.exit(main())
