"""Measures jdaso's methods of data-parallel training, on the same network and links as PyTorch's.

    python bench/lab/lab.py up --nodes 2 --rate 200mbit --delay 1ms
    python bench/lab/lab.py run --pin -- python bench/peers/jdaso_peer.py

Prints a line of JSON for each variant, as torch_peers.py does. Each round of ``--period`` steps
with exchanges is paired with a round of plain optax on every node alone, right before it.
``ratio`` is the median of the pairs' ratios. Without ``--period`` and ``--delay``, the script
measures the times of a step and of an exchange, and uses what jdaso.perf.hiding_schedule returns
for them. Before each timed round there is an untimed round of the same kind, so that exchanges are
in flight as in a long training. All exchanges have been transferred before a round of plain optax
begins. Bytes are those that the exchanges report.

- ``none``: no communication
- ``synchronous``: the mean of the gradients at every step, in float32
- ``synchronous-bf16``: the same in bfloat16
- ``daso``: the mean of the parameters once a period, merged ``--delay`` steps later, in float32
- ``daso-bf16``: the same in bfloat16
- ``daso-int8``: the same in int8, with error feedback
- ``daso-float4``: the same in float4, only if named in ``--variants``
- ``local_sgd``, ``dasgd``: in float32, only if named in ``--variants``

With ``--train FOLDER`` it trains on images until a mean loss is reached, as torch_peers.py does.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("NPROC", "16")  # number of XLA's threads on any number of cores

import jax
import jax.numpy as jnp
import optax
import workload
from jax import lax

import jdaso

sys.path.append(str(Path(__file__).parents[1]))
from machine import keep_memory
from step import ReportTotals, apply_gradients, pair

VARIANTS = ("none", "synchronous", "synchronous-bf16", "daso", "daso-bf16", "daso-int8")
WIRES = {"bf16": "bfloat16", "int8": "int8", "float4": "float4"}
MORE_VARIANTS = ("daso-float4", "local_sgd", "dasgd")


def loss_fn(parameters, layers, images, labels):
    """The network of workload.py in JAX: mean cross entropy."""
    x = images
    for (kind, _, _), layer in zip(layers, parameters, strict=True):
        if kind == "conv":
            x = lax.conv_general_dilated(
                x, layer["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            mean = x.mean((0, 1, 2))
            variance = jnp.square(x - mean).mean((0, 1, 2))
            x = (x - mean) * (lax.rsqrt(variance + 1e-5) * layer["scale"]) + layer["shift"]
            x = jax.nn.relu(x)
            # On CPUs this is faster than the gradient of lax.reduce_window.
            even, odd = x[:, ::2], x[:, 1::2]
            x = jnp.maximum(
                jnp.maximum(even[:, :, ::2], even[:, :, 1::2]),
                jnp.maximum(odd[:, :, ::2], odd[:, :, 1::2]),
            )
        else:
            x = x.reshape(len(x), -1) @ layer["kernel"] + layer["bias"]
            if layer is not parameters[-1]:
                x = jax.nn.relu(x)
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


class Training:
    """A training step and its state."""

    def __init__(self, variant: str, options: argparse.Namespace, exchange: jdaso.Exchange):
        layers = workload.NETWORKS[options.network]
        tx = transformation(variant, options, exchange)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(parameters, state, images, labels):
            loss, grads = jax.value_and_grad(loss_fn)(parameters, layers, images, labels)
            return *apply_gradients(tx, grads, state, parameters), loss

        self._step = step
        self._first = workload.first_parameters(options.network, options.seed)
        self._init = tx.init
        self.restart()

    def restart(self) -> None:
        """Back to the first parameters, without compiling again."""
        self._parameters = jax.tree.map(jnp.array, self._first)
        self._state = self._init(self._parameters)

    def __call__(self, images, labels) -> jax.Array:
        """Takes a step; returns the loss before it."""
        self._parameters, self._state, loss = self._step(
            self._parameters, self._state, images, labels
        )
        return jax.block_until_ready((self._parameters, loss))[1]


def transformation(variant, options, exchange) -> optax.GradientTransformation:
    """The optimizer of a variant."""
    sgd = optax.sgd(options.learning_rate, workload.MOMENTUM)
    wire = WIRES.get(variant.partition("-")[2], "float32")
    if variant == "none":
        return sgd
    if variant.startswith("synchronous"):
        return jdaso.chain(sgd, jdaso.allreduce_gradients(exchange, wire=wire))
    if variant == "local_sgd":
        return jdaso.chain(sgd, jdaso.local_sgd(exchange, options.period))
    if variant == "dasgd":
        return jdaso.chain(sgd, jdaso.dasgd(exchange, options.period, options.delay))
    schedule = jdaso.constant(options.period, options.delay)
    return jdaso.chain(sgd, jdaso.daso(exchange, schedule=schedule, wire=wire))


def random_batch(options, topology):
    key = jax.random.key(topology.rank, impl="rbg")
    images = jax.random.normal(key, (options.batch, 32, 32, 3))
    return images, jax.random.randint(key, (options.batch,), 0, 10)


def recommend(options, topology) -> tuple[int, int]:
    """Returns the recommended period and delay. Exchanges are measured during training."""
    exchange = jdaso.mpi_exchange(topology)
    batch = random_batch(options, topology)
    options.period, options.delay = 4, 3
    alone, with_exchanges = (Training(name, options, exchange) for name in ("none", "daso"))
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        alone(*batch)
        seconds.append(time.perf_counter() - start)
    for _ in range(16):
        with_exchanges(*batch)
    transfers = [end - start for start, end in (record.transfer for record in exchange.history())]
    found = statistics.median(seconds[2:]), statistics.median(transfers[1:])
    return jdaso.perf.hiding_schedule(*(max(topology.comm.allgather(value)) for value in found))


def measure(variant: str, options, topology) -> dict:
    """Measures rounds of steps on random images, each paired with a round of plain optax."""
    comm = topology.comm
    exchange = jdaso.mpi_exchange(topology)
    batch = random_batch(options, topology)

    def runs(name: str) -> Callable[[int], float]:
        training = Training(name, options, exchange)

        def run(steps: int) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                training(*batch)
            return (time.perf_counter() - start) / steps

        return run

    rest = runs("none"), runs(variant), options.period, options.period
    for _ in range(2):  # compilation and first use of memory
        pair(comm, exchange, ReportTotals(exchange), *rest)
    totals = ReportTotals(exchange)
    slowest = [pair(comm, exchange, totals, *rest) for _ in range(options.rounds)]
    seconds = [with_exchanges for _, with_exchanges in slowest]
    return {
        "seconds_per_step": spread(seconds),
        "seconds_per_step_alone": spread([base for base, _ in slowest]),
        "ratio": spread([with_exchanges / base for base, with_exchanges in slowest]),
        "images_per_second": topology.num_nodes * options.batch / statistics.median(seconds),
        "bytes_sent_per_step": round(totals["bytes_sent"] / (options.rounds * options.period)),
        "seconds_in_flight": max(comm.allgather(totals.per_exchange("seconds_in_flight"))),
        "seconds_blocked": max(comm.allgather(totals.per_exchange("seconds_blocked"))),
        "steps": options.rounds * options.period,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def train(variant: str, options, topology) -> dict:
    """Trains until the target loss, and prints the loss over time. Returns the time it took."""
    images, labels = options.images
    comm, nodes = topology.comm, topology.num_nodes
    exchange = jdaso.mpi_exchange(topology)
    training = Training(variant, options, exchange)
    places = workload.order(len(images), nodes, topology.node, options.batch, 0, options.seed)[0]
    training(workload.scaled(images[places]), labels[places])  # compiles
    training.restart()
    losses, step, loss = [], 0, float("inf")
    comm.Barrier()
    start = time.perf_counter()
    for epoch in range(options.epochs):
        order = workload.order(
            len(images), nodes, topology.node, options.batch, epoch, options.seed
        )
        for places in order:
            losses.append(training(workload.scaled(images[places]), labels[places]))
            step += 1
            if step % options.log_every == 0:
                loss = comm.allreduce(float(jnp.stack(losses).mean())) / nodes
                losses.clear()
                seconds = time.perf_counter() - start
                line = {"variant": variant, "step": step, "seconds": seconds, "loss": loss}
                say(line, topology)
                if loss <= options.target_loss:
                    break
        if loss <= options.target_loss:
            break
    total = time.perf_counter() - start
    return {
        "reached": loss <= options.target_loss,
        "target_loss": options.target_loss,
        "loss": loss,
        "seconds": total,
        "images_per_second": nodes * options.batch * step / total,
        "bytes_sent_per_step": round(exchange.report()["bytes_sent"] / step),
        "steps": step,
    }


def say(line: dict, topology) -> None:
    """Prints a line of JSON on the first node."""
    if topology.rank == 0:
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variants", nargs="+", default=VARIANTS, choices=VARIANTS + MORE_VARIANTS)
    add("--network", default="conv", choices=workload.NETWORKS)
    add("--batch", type=int, help="images per node and step; the network's own by default")
    add("--period", type=int, help="with --delay; default: the recommended one")
    add("--delay", type=int, help="steps until an exchange is merged")
    add("--rounds", type=int, default=5, help="timed rounds of --period steps")
    add("--learning-rate", type=float, default=0.01)
    add("--seed", type=int, default=0)
    add("--train", type=Path, metavar="FOLDER", help="folder with train/<class>/*.jpg")
    add("--target-loss", type=float, default=1.0)
    add("--epochs", type=int, default=10, help="largest number of epochs")
    add("--log-every", type=int, default=20, metavar="STEPS")
    options = parser.parse_args()
    if (options.period is None) != (options.delay is None):
        parser.error("--period and --delay must be given together")
    options.batch = options.batch or workload.BATCH[options.network]
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    if options.period is None:
        options.period, options.delay = recommend(options, topology)
    about = {
        "network": options.network,
        "nodes": topology.num_nodes,
        "batch": options.batch,
        "period": options.period,
        "delay": options.delay,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }
    if options.train:
        options.images = workload.load(options.train / "train")
    for variant in options.variants:
        result = (train if options.train else measure)(variant, options, topology)
        say({"peer": "jdaso", "variant": variant, **result, **about}, topology)


if __name__ == "__main__":
    main()
