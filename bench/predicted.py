"""Compares what jdaso.perf predicts with what is measured, over nodes, links and algorithms.

    python bench/predicted.py [--nodes 2 4] [--rates 100mbit 200mbit 1gbit] [--delay 1ms]

For each number of nodes and each rate the script creates a cluster of the network lab (root,
Linux). There ``python -m jdaso tune`` measures the network. From this and the time of a step
without exchanges, jdaso.perf.predict predicts the step time of each algorithm, and
bench/peers/jdaso_peer.py measures it.

    python bench/lab/lab.py up --nodes 2 --rate 200mbit --delay 1ms
    python bench/lab/lab.py run --pin -- python bench/predicted.py delays [--seconds 0.8 0.4]

compares the smallest delay at which training never waits with the recommended one. For each step
time the script measures a step without exchanges and the transfer of an exchange during training.
It passes both to jdaso.perf.hiding_schedule, and trains with the recommended delay and its
neighbors. A step counts as not waiting if the wait is less than a hundredth of the step.

    python bench/lab/lab.py run --pin -- python bench/predicted.py choice --task transformer

compares what ``tune`` chooses for a task of bench/progress.py with other settings, by the seconds
until they reach the loss with which synchronous training ends. All have the same learning rate, the
best of synchronous training. ``--task CNN`` needs ``--cifar FOLDER``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parent / folder) for folder in ("lab", "peers")]

import jax
import jax.numpy as jnp
import lab
import numpy as np
import optax
import workload
from machine import header, keep_memory, machine, row
from step import apply_gradients, make_step, matmuls_for

import jdaso
from jdaso import perf
from jdaso.perf import tune_command
from jdaso.perf.model import COMPARED_WIRES

PEER = Path(__file__).parent / "peers" / "jdaso_peer.py"
PERIOD, DELAY = 4, 3
LEAVES, NEGLIGIBLE = 100, 0.01  # of the training with different delays
WIRE = "float32"  # of all variants
# The variants of jdaso_peer.py, with algorithm and arguments of their predictions.
VARIANTS = {
    "synchronous": ("allreduce_gradients", {"wire": WIRE}),
    "local_sgd": ("local_sgd", {"period": PERIOD}),
    "dasgd": ("dasgd", {"period": PERIOD, "delay": DELAY}),
    "daso": ("daso", {"period": PERIOD, "delay": DELAY}),
}


def run(cluster: lab.Cluster, command: list[str]) -> str:
    done = cluster.run([sys.executable, *command], pin=True, timeout=900)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def tuned(cluster: lab.Cluster, count: int) -> dict[str, Any]:
    """The arguments of ``perf.predict`` that tune measures and prints."""
    return measured_by_tune(run(cluster, ["-m", "jdaso", "tune", "--parameters", str(count)]))


def measured_by_tune(text: str) -> dict[str, Any]:
    """The arguments of ``perf.predict`` in the report of tune."""

    def numbers(pattern: str) -> list[float]:
        found = re.search(f"^{pattern}", text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"tune did not print {pattern}:\n{text}")
        return [float(number) for number in found.groups()]

    (latency,) = numbers(r"latency +(\S+) s")
    (bandwidth,) = numbers(r"bandwidth +(\S+) Gbit/s")
    _, overhead, slowdown = numbers(rf"{WIRE} +(\S+) +(\S+) +(\S+)$")
    network = perf.Network(latency, bandwidth * 1e9 / 8)
    return {"network": network, "overhead": overhead, "slowdown": slowdown}


def print_steps(options: argparse.Namespace) -> None:
    """Predicted and measured step times."""
    count = workload.number_of_parameters(options.network)
    peer = [str(PEER), "--network", options.network]
    peer += ["--variants", *VARIANTS, "--period", str(PERIOD), "--delay", str(DELAY)]
    print(machine())
    print(f"{options.network}, {count} parameters; period {PERIOD}, delay {DELAY}; one core a node")
    names = ("nodes", "link", "algorithm", "alone, s", "predicted, s", "measured, s")
    print(header(*names, "predicted / measured"), flush=True)
    for nodes in options.nodes:
        for rate in options.rates:
            try:
                with lab.up(nodes, rate, options.delay) as cluster:
                    found = tuned(cluster, count)
                    text = run(cluster, [*peer, "--rounds", str(options.rounds)])
            except lab.Missing as error:
                print(f"skipped: {error}")
                sys.exit(77)
            for line in map(json.loads, text.splitlines()):
                alone = line["seconds_per_step_alone"]["median"]
                # The ratio comes from pairs, because the speed of a shared machine varies.
                measured = alone * line["ratio"]["median"]
                algorithm, arguments = VARIANTS[line["variant"]]
                predicted = perf.predict(
                    algorithm,
                    nodes,
                    num_parameters=count,
                    step_time=alone,
                    **found,
                    **arguments,
                ).step_time
                cells = [nodes, f"{rate}, {options.delay}", line["variant"]]
                cells += [f"{x:.3f}" for x in (alone, predicted, measured, predicted / measured)]
                print(row(*cells), flush=True)


# -------------------------------------------------------------- The recommended delay, and others


def print_delays(options: argparse.Namespace) -> None:
    """For each step time, the recommended delay and the smallest that does not wait."""
    os.environ.setdefault("NPROC", "16")
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm
    exchange = jdaso.mpi_exchange(topology)
    size = int(options.megabytes * 250_000 / LEAVES)
    params = [jnp.full((size,), float(i + topology.rank)) for i in range(LEAVES)]
    sgd = optax.sgd(1.0)
    say = print if topology.rank == 0 else lambda *_, **__: None

    def longest(values: list[float]) -> float:
        """The median of the times of the slowest node."""
        return statistics.median(max(found) for found in zip(*comm.allgather(values), strict=True))

    def train(matmuls: int, steps: int, tx) -> list[float]:
        """Takes steps and returns the seconds of each."""
        step, times = make_step(tx, matmuls), []
        state = [jax.tree.map(jnp.copy, params), tx.init(params)]
        comm.Barrier()
        for _ in range(steps):
            start = time.perf_counter()
            *state[:], slope = step(*state)
            jax.block_until_ready((state, slope))
            times.append(time.perf_counter() - start)
        return times

    def with_exchanges(matmuls: int, delay: int) -> tuple[float, float]:
        """Measures the transfer and the wait of an exchange, in seconds."""
        schedule = jdaso.constant(delay + 1, delay)
        tx = jdaso.chain(sgd, jdaso.daso(exchange, schedule=schedule))
        train(matmuls, (options.exchanges + 3) * (delay + 1), tx)
        # The first exchanges include compilation and the first use of memory.
        records = exchange.history()[-options.exchanges :]
        transfers = [end - start for start, end in (record.transfer for record in records)]
        waits = [end - start for start, end in (record.wait for record in records)]
        return longest(transfers), longest(waits)

    say(machine())
    say(f"{topology.num_nodes} nodes, one core each; {options.megabytes:g} MB of float32")
    names = ("step, s", "exchange, s", "steps", "recommended", "waits, ms, by delay")
    say(header(*names, "waits no more at"), flush=True)
    for seconds in options.seconds:
        matmuls = max(comm.allgather(matmuls_for(seconds)))
        alone = longest(train(matmuls, 10, sgd)[2:])
        blocking, _ = with_exchanges(matmuls, 0)
        transfer, _ = with_exchanges(matmuls, int(blocking / alone) + 2)
        recommended = perf.hiding_schedule(alone, transfer).delay
        waits = {
            delay: with_exchanges(matmuls, delay)[1]
            for delay in range(max(recommended - 1, 0), recommended + 3)
        }
        enough = [delay for delay, wait in waits.items() if wait < NEGLIGIBLE * alone]
        listed = ", ".join(f"{delay}: {1e3 * wait:.1f}" for delay, wait in waits.items())
        found = min(enough) if enough else f"above {max(waits)}"
        times = f"{alone:.3f}", f"{transfer:.3f}", f"{transfer / alone:.2f}"
        say(row(*times, recommended, listed, found), flush=True)


# ------------------------------------------------------------ The choice of tune among settings

#: The best learning rates of synchronous training on two nodes, by bench/progress.py.
RATES = {"CNN": 0.04, "transformer": 0.01, "MLP": 0.08}
#: Algorithm, merge, wire, period and delay.
OTHERS = [
    ("allreduce_gradients", "", "float32", 1, 0),
    ("allreduce_gradients", "", "bfloat16", 1, 0),
    *[("local_sgd", "mean", "float32", period, 0) for period in (2, 4, 8)],
    *[("daso", "delta", "float32", *setting) for setting in ((2, 1), (4, 1), (4, 3), (8, 7))],
    ("daso", "delta", "bfloat16", 4, 1),
    ("daso", "mean", "float32", 4, 3),
    ("dasgd", "mean", "float32", 4, 3),
]


def averaging(exchange: jdaso.Exchange, setting: tuple) -> jdaso.Averaging:
    algorithm, merge, wire, period, delay = setting
    if algorithm == "allreduce_gradients":
        return jdaso.allreduce_gradients(exchange, wire=wire)
    return getattr(jdaso, algorithm)(exchange, period, delay, merge=merge, wire=wire)


def chosen(topology: jdaso.Topology, parameters: int, step_time: float) -> list[tuple]:
    """The settings that tune recommends, the best first. All nodes get those of the first."""
    options = argparse.Namespace(
        parameters=parameters, repeats=9, moments=0, moments_wire="float32", seconds=60.0
    )
    exchange, costs = jdaso.mpi_exchange(topology), {}
    for wire in COMPARED_WIRES:
        found = tune_command.sweep(options, topology.group, exchange, wire, [parameters], 15.0)
        costs[wire] = found.costs(found.largest)
    found = perf.recommend(step_time, costs, topology.num_nodes)
    return topology.comm.bcast([setting[:5] for setting in found])


def print_choice(options: argparse.Namespace) -> None:
    """For each setting, the seconds until the loss of synchronous training."""
    from progress import EVERY, Trainer, tasks

    keep_memory()
    task = tasks(options.cifar)[options.task]()
    topology = jdaso.discover_topology(processes_per_node=1)
    comm, node = topology.comm, topology.node
    say = print if topology.rank == 0 else lambda *_, **__: None
    trainer, rate = Trainer(task, topology.num_nodes), RATES[options.task]
    longest = int(options.longer * options.steps)

    def program(tx):
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, seed, number):
            loss, grads = trainer.gradients_of_node(params, seed, node, number)
            return apply_gradients(tx, grads, state, params, value=loss)

        return step

    def train(tx, step, seed: int, steps: int) -> tuple[np.ndarray, float]:
        """Returns the losses of the mean of the nodes, and the seconds of a step."""
        params = trainer.start(jnp.array([seed]))[0]
        state, kept = tx.init(params), []
        comm.Barrier()
        start = time.perf_counter()
        for number in range(1, steps + 1):
            params, state = jax.block_until_ready(step(params, state, seed, number))
            if number % EVERY == 0:
                kept.append(np.array(params))
        seconds = max(comm.allgather(time.perf_counter() - start)) / steps
        means = comm.allreduce(np.stack(kept)) / topology.num_nodes
        return np.array(trainer.evaluate(means[:, None])), seconds

    sgd = task.optimizer(rate)
    count, alone = trainer.start(jnp.array([0]))[0].size, program(sgd)
    train(sgd, alone, 0, 20)  # compiles
    step_time = statistics.median(train(sgd, alone, 0, 60)[1] for _ in range(5))
    say(machine())
    say(
        f"{options.task}, {count} parameters, {topology.num_nodes} nodes; a step alone takes "
        f"{1e3 * step_time:.2f} ms; {options.seeds} seeds; the loss after {options.steps} "
        "synchronous steps\n",
        flush=True,
    )
    best, *alternatives = chosen(topology, count, step_time)
    settings = list(dict.fromkeys([*OTHERS, best, *alternatives]))
    exchange = jdaso.mpi_exchange(topology)
    prepared = {}
    for setting in settings:
        tx = jdaso.chain(sgd, averaging(exchange, setting))
        prepared[setting] = tx, program(tx)
        train(*prepared[setting], 0, 20)  # compiles
    found: dict[tuple, list] = {setting: [] for setting in settings}
    for seed in range(options.seeds):
        for setting in settings:
            losses, seconds = train(*prepared[setting], seed, longest)
            if setting == settings[0]:  # synchronous training
                target = np.median(losses[: options.steps // EVERY][-5:])
            above = int((losses > target).sum())  # also right where a loss rises in between
            steps = EVERY * (above + 1) if above < len(losses) else np.inf
            found[setting].append((steps, seconds))
    means = {setting: np.mean(values, axis=0) for setting, values in found.items()}
    totals = {s: np.mean([a * b for a, b in values]) for s, values in found.items()}
    shortest = min(totals.values())
    say(header("setting", "step, ms", "steps", "seconds", "over the shortest", "tune"))
    for setting in sorted(settings, key=totals.get):
        algorithm, merge, wire, period, delay = setting
        name = f"{algorithm} {period}/{delay}{', delta' * (merge == 'delta')}, {wire}"
        place = "chosen" if setting == best else "next" if setting in alternatives else ""
        steps, seconds = means[setting]
        total = totals[setting]
        cells = f"{1e3 * seconds:.2f}", f"{steps:.0f}", f"{total:.2f}", f"{total / shortest:.2f}"
        say(row(name, *cells, place))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("steps", "delays", "choice"), default="steps")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "1gbit"])
    parser.add_argument("--delay", default="1ms", help="of a link, one way")
    parser.add_argument("--network", default="conv", choices=workload.NETWORKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=10, help="of parameters, with delays")
    seconds = [0.8, 0.4, 0.25, 0.15, 0.1]
    parser.add_argument("--seconds", type=float, nargs="+", default=seconds, help="times of a step")
    parser.add_argument("--exchanges", type=int, default=12, help="exchanges of a run, with delays")
    parser.add_argument("--task", default="transformer", choices=RATES, help="with choice")
    parser.add_argument("--cifar", type=Path, help="folder with train/<class>/*.jpg")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each setting")
    parser.add_argument("--steps", type=int, default=240, help="of synchronous training")
    longer = "steps of the others, in those of synchronous training"
    parser.add_argument("--longer", type=float, default=2.5, help=longer)
    options = parser.parse_args()
    parts = {"steps": print_steps, "delays": print_delays, "choice": print_choice}
    parts[options.part](options)


if __name__ == "__main__":
    main()
