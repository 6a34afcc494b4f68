"""jdaso's ways of data-parallel training, on the same network and links as its peers.

    python bench/lab/lab.py up --nodes 2 --rate 200mbit --delay 1ms
    python bench/lab/lab.py run --pin -- python bench/peers/jdaso_peer.py --period 4 --delay 2

Prints a line of JSON for each variant, as torch_peers.py does. A round of ``--period`` steps with
exchanges is paired with one of plain optax, right before it, on every node alone: ``ratio`` is
what the exchanges cost a step, the median of the pairs' ratios.

- ``synchronous``: the mean of the gradients at every step, in float32
- ``synchronous-bf16``: the same in bfloat16
- ``daso``: parameters, posted once a period and merged ``--delay`` steps later, in float32
- ``daso-bf16``: the same in bfloat16
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
from pathlib import Path

os.environ.setdefault("NPROC", "16")  # XLA's threads, however few cores a node has

import jax
import jax.numpy as jnp
import optax
import workload
from jax import lax

import jdaso

sys.path.append(str(Path(__file__).parents[1]))
from machine import keep_memory

VARIANTS = ("synchronous", "synchronous-bf16", "daso", "daso-bf16")


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
            x = lax.reduce_window(
                jax.nn.relu(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
            )
        else:
            x = x.reshape(len(x), -1) @ layer["kernel"] + layer["bias"]
            if layer is not parameters[-1]:
                x = jax.nn.relu(x)
    return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()


def transformation(variant: str, options, exchange) -> optax.GradientTransformation:
    """The optimizer of a variant."""
    sgd = optax.sgd(options.learning_rate, workload.MOMENTUM)
    wire = "bfloat16" if variant.endswith("bf16") else "float32"
    if variant == "none":
        return sgd
    if variant.startswith("synchronous"):
        return optax.chain(jdaso.allreduce_gradients(exchange, wire=wire), sgd)
    schedule = jdaso.constant(options.period, options.delay)
    return optax.chain(sgd, jdaso.daso(exchange, schedule, wire=wire))


def make(tx: optax.GradientTransformation, options):
    """A training step with its state: ``step(images, labels) -> loss``."""
    layers = workload.NETWORKS[options.network]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def jitted(parameters, state, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(parameters, layers, images, labels)
        updates, state = tx.update(grads, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    parameters = jax.tree.map(jnp.asarray, workload.first_parameters(options.network, options.seed))
    carried = [parameters, tx.init(parameters)]

    def step(images, labels):
        *carried[:], loss = jitted(*carried, images, labels)
        return loss

    return step, carried


def measure(variant: str, options, topology) -> dict:
    """Rounds of steps on random images, each beside one of plain optax."""
    comm = topology.comm
    exchange = jdaso.mpi_exchange(topology)
    key = jax.random.key(topology.rank, impl="rbg")
    images = jax.random.normal(key, (options.batch, 32, 32, 3))
    labels = jax.random.randint(key, (options.batch,), 0, 10)
    alone, with_exchanges = (
        make(transformation(name, options, exchange), options) for name in ("none", variant)
    )

    def take_round(training) -> float:
        step, carried = training
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(options.period):
            step(images, labels).block_until_ready()
        jax.block_until_ready(carried)
        return (time.perf_counter() - start) / options.period

    for _ in range(2):  # compilation, and memory
        take_round(alone), take_round(with_exchanges)
    before = exchange.report()
    pairs = [(take_round(alone), take_round(with_exchanges)) for _ in range(options.rounds)]
    after = exchange.report()
    mine = [list(times) for times in zip(*pairs, strict=True)]
    # Of each round the slowest node's counts.
    base, seconds = (
        [max(t) for t in zip(*times, strict=True)]
        for times in zip(*comm.allgather(mine), strict=True)
    )
    ratios = [b / a for a, b in zip(base, seconds, strict=True)]
    exchanges = max(after["exchanges"] - before["exchanges"], 1)
    steps = options.rounds * options.period
    return {
        "seconds_per_step": spread(seconds),
        "seconds_per_step_alone": spread(base),
        "ratio": spread(ratios),
        "images_per_second": topology.num_nodes * options.batch / statistics.median(seconds),
        "bytes_sent_per_step": round((after["bytes_sent"] - before["bytes_sent"]) / steps),
        "seconds_in_flight": (after["seconds_in_flight"] - before["seconds_in_flight"]) / exchanges,
        "seconds_blocked": (after["seconds_blocked"] - before["seconds_blocked"]) / exchanges,
        "steps": steps,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--variants", nargs="+", default=VARIANTS, choices=VARIANTS)
    add("--network", default="conv", choices=workload.NETWORKS)
    add("--batch", type=int, help="images per node and step; the network's own by default")
    add("--period", type=int, default=4)
    add("--delay", type=int, default=2)
    add("--rounds", type=int, default=5, help="of --period steps, timed")
    add("--learning-rate", type=float, default=0.01)
    add("--seed", type=int, default=0)
    options = parser.parse_args()
    options.batch = options.batch or workload.BATCH[options.network]
    keep_memory()
    topology = jdaso.discover_topology(processes_per_node=1)
    about = {
        "network": options.network,
        "nodes": topology.num_nodes,
        "batch": options.batch,
        "period": options.period,
        "delay": options.delay,
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
    }
    for variant in options.variants:
        result = measure(variant, options, topology)
        if topology.rank == 0:
            print(json.dumps({"peer": "jdaso", "variant": variant, **result, **about}), flush=True)


if __name__ == "__main__":
    main()
