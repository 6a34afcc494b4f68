"""Measures everything that only a GPU can show, in one command, within 10 minutes.

    python bench/gpu.py [--sections parity tax resnet shared] [--batch 64] [--image 224] > report.md

The report is Markdown. Each section is an MPI job of two processes on one device, with a time
limit. A section that fails is a row with its message, and the others still run. On a machine
without a GPU all sections run on CPU devices with small sizes, and the report says what it skips.
No network is needed.

- parity: compiled code (``native=True``) and host callbacks give the same bits.
- tax: the table of bench/tax.py. The two processes take their steps in turn.
- resnet: the step of ResNet-50 with and without an exchange in flight. The second process computes
  no gradients, so the first one has the device nearly to itself.
- shared: the same, but both processes train on the device.
- causes: where the time of the step goes. Each row changes one thing. It compiles ResNet-50 once
  for each row, takes up to 15 minutes, and runs only with ``--sections causes``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "examples"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import models  # noqa: E402
import mpi_job  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from machine import machine  # noqa: E402
from pairs import SGD, header, row  # noqa: E402
from step import ReportTotals, apply_gradients, settle  # noqa: E402

import jdaso  # noqa: E402

# Seconds of each section, at most. The sum of the default ones is below 10 minutes.
LIMITS = {"parity": 90, "tax": 130, "resnet": 240, "shared": 120, "causes": 900}
DEFAULT = [section for section in LIMITS if section != "causes"]
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


def print_parity(on_gpu, seconds):
    """Compares compiled code with host callbacks, and prints a row for each set of options."""
    children = HERE.parent / "tests" / "support" / "children"
    chosen = PARITY if on_gpu else {name: PARITY[name] for name in ("float32", "int8")}
    with tempfile.TemporaryDirectory() as folder:
        program = [
            [name, "native.py", [*options, "--callbacks", folder], True]
            for name, options in chosen.items()
        ]
        job = mpi_job.run(2, seconds, children / "batch.py", json.dumps(program), **MEMORY)
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


def print_tax(on_gpu, seconds):
    """Runs bench/tax.py with compiled code."""
    size = ["--megabytes", 256, "--pairs", 36] if on_gpu else ["--megabytes", 1, "--pairs", 8]
    names = TAX if on_gpu else TAX[1:2]
    command = [HERE / "tax.py", *size, "--native", "--only", *names]
    job = mpi_job.run(2, seconds, *command, **MEMORY)
    print(job.stdout, end="")
    return job


def print_training(section, arguments, on_gpu, seconds):
    """Runs :func:`train` on two processes."""
    command = [__file__, "--train", section]
    if on_gpu:
        command += ["--model", arguments.model, "--steps", arguments.steps]
        command += ["--batch", arguments.batch, "--image", arguments.image]
        command += ["--pairs", arguments.pairs]
    else:
        command += ["--model", TINY, "--batch", 2, "--image", 8, "--steps", 4, "--pairs", 2]
    job = mpi_job.run(2, seconds, *command, **MEMORY)
    print(job.stdout, end="")
    return job


def report(arguments):
    """Prints the report. Returns the number of sections that failed."""
    start = time.monotonic()
    probe = mpi_job.run(1, 60, "-c", PROBE, **MEMORY)
    found = probe.stdout.split(maxsplit=2)
    on_gpu = found[:1] == ["gpu"]
    print(f"# What only a GPU can show\n\n{machine()}  ")
    print(f"JAX's devices: {probe.problem or probe.stdout.strip()}\n")
    if probe.problem is not None:
        MEMORY["JAX_PLATFORMS"] = "cpu"
    if not on_gpu:
        print(
            "Skipped, because JAX finds no GPU: the copies for CUDA devices, times on a GPU, and "
            "ResNet-50. The sections below ran on CPU devices with small sizes.\n"
        )
    run = {
        "parity": lambda limit: print_parity(on_gpu, limit),
        "tax": lambda limit: print_tax(on_gpu, limit),
        "resnet": lambda limit: print_training("resnet", arguments, on_gpu, limit),
        "shared": lambda limit: print_training("shared", arguments, on_gpu, limit),
        "causes": lambda limit: print_training("causes", arguments, on_gpu, limit),
    }
    ended = {}
    for section in arguments.sections:
        print(f"## {section}\n", flush=True)
        since = time.monotonic()
        try:
            job = run[section](arguments.limit or LIMITS[section])
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

    def prepare(self, tx, computes, compiler_options=None):
        """Compiles a step with or without gradients.

        Returns:
            A function that takes steps and returns (seconds, seconds until dispatched) of one.
        """

        @functools.partial(jax.jit, donate_argnums=(0, 1), compiler_options=compiler_options)
        def step(params, opt_state, batch):
            if computes:
                _, grads = self._value_and_grad(params, *batch)
            else:
                grads = jax.tree.map(jnp.zeros_like, params)
            return apply_gradients(tx, grads, opt_state, params)

        state = [jax.tree.map(jnp.copy, self.params), tx.init(self.params)]

        def run(steps):
            start = time.perf_counter()
            for _ in range(steps):
                state[:] = step(*state, self._batch)
            dispatched = time.perf_counter() - start
            jax.block_until_ready(state)
            return (time.perf_counter() - start) / steps, dispatched / steps

        return run


class Variant(NamedTuple):
    """A row of a table of trainings.

    Attributes:
        native: whether compiled code makes the copies.
        options: compiler options, or None.
        conditionals: whether a program for a GPU has the conditionals of those for CPUs.
    """

    schedule: jdaso.Schedule
    native: bool = True
    guard: str = "skip"
    options: dict | None = None
    conditionals: bool = False

    def tracing(self, exchange):
        """A context in which the step is traced."""
        if not self.conditionals:
            return contextlib.nullcontext()
        return mock.patch.object(type(exchange), "platform", "cpu")


def variants(section, schedule):
    """The rows of a section."""
    if section == "shared":  # two processes compile there, which takes time
        return {"compiled": Variant(schedule)}
    if section == "resnet":
        return {"compiled": Variant(schedule), "callbacks": Variant(schedule, native=False)}
    rare = Variant(jdaso.constant(1 << 20, 1))
    region = {"xla_gpu_copy_insertion_use_region_analysis": True}
    on_gpu = jax.default_backend() == "gpu"
    conditionals = rare._replace(conditionals=True)
    return {
        "default": Variant(schedule),
        "nothing due": rare,
        "nothing due, guard off": rare._replace(guard="off"),
        "nothing due, conditionals": conditionals,
        "nothing due, conditionals, region analysis": conditionals._replace(
            options=region if on_gpu else None
        ),
    }


def train(arguments):
    """Measures steps with and without an exchange in flight. It runs on two processes."""
    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm.Dup()
    say = print if topology.rank == 0 else lambda *_, **__: None
    model = Model(arguments, topology)
    computes = topology.rank == 0 or arguments.train == "shared"
    local = SGD if computes else optax.set_to_zero()
    alone = model.prepare(local, computes)
    alone(2)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(model.params))
    say(
        f"{arguments.model}, batch {arguments.batch}, {arguments.image} x {arguments.image} "
        f"pixels, {nbytes / 1e6:.0f} MB of parameters; daso, period {arguments.steps}, delay "
        f"{arguments.steps - 1}; {arguments.pairs} pairs of {arguments.steps} steps\n"
    )
    columns = ("alone, ms", "with, ms", "ratio", "range", "dispatched after, ms: alone", "with")
    say(header("copies", *columns, "blocked, ms per exchange"), flush=True)
    schedule = jdaso.constant(arguments.steps, arguments.steps - 1)
    for name, variant in variants(arguments.train, schedule).items():
        exchange = jdaso.mpi_exchange(topology, native=variant.native)
        averaging = jdaso.daso(exchange, schedule=variant.schedule, nonfinite=variant.guard)
        within = model.prepare(jdaso.chain(local, averaging), computes, variant.options)
        with variant.tracing(exchange):
            within(2 * arguments.steps)
        totals, found = ReportTotals(exchange), []
        for _ in range(arguments.pairs):
            settle(exchange)
            comm.Barrier()
            base = alone(arguments.steps) if computes else None
            comm.Barrier()
            with totals:
                found.append((base, within(arguments.steps)))
        blocked = 1e3 * max(comm.allgather(totals.per_exchange("seconds_blocked")))
        exchange.close()
        if topology.rank > 0:
            continue
        ratios = [both[0] / base[0] for base, both in found]
        times = [
            f"{1e3 * statistics.median(pair[i][j] for pair in found):.1f}"
            for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))
        ]
        cells = f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}..{max(ratios):.3f}"
        say(row(name, *times[:2], *cells, *times[2:], f"{blocked:.1f}"), flush=True)


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
    parser.add_argument("--train", choices=("resnet", "shared", "causes"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments)
        return 0
    return min(report(arguments), 1)


if __name__ == "__main__":
    sys.exit(main())
