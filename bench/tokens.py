"""Tokens per second of a language model with exchanges, over those of the same nodes without.

    bench/lab/lab.py run --pin -- python bench/tokens.py [--only "Streaming|DASO"] [--pairs 5]

Every process trains the model of examples/papers/language_model.py with AdamW, on one core. A pair
has two periods of steps without exchanges and three with them. The first of these three is not
timed, so the timed steps have as many merges as posts. The slowest node counts in
both. The table has the median of the pairs' ratios of tokens per second, its range, the mean time
for which an exchange blocks training on the slowest node, and the megabytes that a node sends at
each step.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import sys
from pathlib import Path

from machine import keep_memory, machine, own_core

# One core for each process, as on a node whose accelerator does the computing.
os.environ.setdefault("NPROC", "16")
own_core()

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from step import ReportTotals, apply_gradients, settle, timed  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "papers"))

from language import transformer  # noqa: E402

import jdaso  # noqa: E402

OUTER = optax.sgd(0.4, momentum=0.9, nesterov=True)


def methods(period, hidden):
    """By name, ``exchange -> averaging``. ``hidden`` has period and delay of DASO and DaSGD."""
    late = {"delay": 5, "mix": 0.5, "fragments": transformer.strided_fragments(2)}
    both = f"{hidden[0]}/{hidden[1]}"
    return {
        "Streaming DiLoCo, float4": lambda x: jdaso.diloco(x, period, OUTER, wire="float4", **late),
        "Streaming DiLoCo, float32": lambda x: jdaso.diloco(x, period, OUTER, **late),
        "DiLoCo": lambda x: jdaso.diloco(x, period, OUTER),
        "local SGD": lambda x: jdaso.local_sgd(x, period),
        f"DASO {both}": lambda x: jdaso.daso(x, *hidden),
        f"DaSGD {both}": lambda x: jdaso.dasgd(x, *hidden),
        "data parallel": lambda x: jdaso.allreduce_gradients(x, wire="float32"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--period", type=int, default=30)
    late = "period and delay of DASO and DaSGD"
    parser.add_argument("--hidden", type=int, nargs=2, default=(2, 1), help=late)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs")
    parser.add_argument("--only", default="", help="regular expression for the methods")
    arguments = parser.parse_args()
    if 2 * arguments.period % arguments.hidden[0]:
        parser.error("twice --period must be a multiple of the period of --hidden")
    keep_memory()

    topology = jdaso.discover_topology(processes_per_node=1)
    comm = topology.comm.Dup()
    say = print if topology.rank == 0 else lambda *_, **__: None
    shape = transformer.Shape(256, arguments.layers, arguments.width, 4, 8 * arguments.width // 3)
    graphdef, params = nnx.split(transformer.Transformer(shape, nnx.Rngs(0)))
    size = arguments.batch_size, arguments.context + 1
    text = np.random.default_rng(topology.node).integers(256, size=size, dtype=np.int32)
    tokens = arguments.batch_size * arguments.context * topology.num_nodes

    def loss(params, text):
        logits = nnx.merge(graphdef, params)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    def prepare(tx):
        state = [jax.tree.map(jax.numpy.copy, params), tx.init(params)]

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, text):
            value, grads = jax.value_and_grad(loss)(params, text)
            return apply_gradients(tx, grads, opt_state, params, value=value)

        run = timed(step, state, text)
        run(arguments.period + 6)  # compilation, and the first use of memory
        return run

    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.1))
    alone = prepare(adamw)
    steps = 2 * arguments.period

    def pair(run, exchange, totals):
        """Tokens per second of all nodes, without and with exchanges."""
        settle(exchange)
        comm.Barrier()
        base = alone(steps)
        comm.Barrier()
        run(arguments.period)
        with totals:
            both = base, run(steps)
        slowest = map(max, zip(*comm.allgather(both), strict=True))
        return [tokens / seconds for seconds in slowest]

    say(machine())
    count = sum(x.size for x in jax.tree.leaves(params))
    say(
        f"{topology.num_nodes} nodes, one core each; {count} parameters, "
        f"period {arguments.period}, {arguments.pairs} pairs of {steps} steps\n"
    )
    say("| method | alone, tokens/s | with | ratio | range | blocked, ms | MB per step |")
    say("|---|---|---|---|---|---|---|")
    for name, averaging in methods(arguments.period, arguments.hidden).items():
        if not re.search(arguments.only, name):
            continue
        exchange = jdaso.mpi_exchange(topology)
        run, totals = prepare(jdaso.chain(adamw, averaging(exchange))), ReportTotals(exchange)
        pairs = [pair(run, exchange, totals) for _ in range(arguments.pairs)]
        ratios = [with_exchange / base for base, with_exchange in pairs]
        blocked = 1e3 * max(comm.allgather(totals.per_exchange("seconds_blocked")))
        sent = totals["bytes_sent"] / arguments.pairs / steps / 1e6
        cells = [f"{statistics.median(column):.0f}" for column in zip(*pairs, strict=True)]
        cells += [f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}..{max(ratios):.3f}"]
        say(f"| {name} | {' | '.join(cells)} | {blocked:.1f} | {sent:.3f} |", flush=True)


if __name__ == "__main__":
    main()
