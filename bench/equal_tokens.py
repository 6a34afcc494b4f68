"""Language models with equal tokens: the loss of each method, its bytes, and its speed on a link.

    python bench/equal_tokens.py [--nodes 2 4] [--seeds 3] [--steps 6000] [--results FILE]
    python bench/equal_tokens.py --steps 300 --layers 2 --width 64 --only "data|DiLoCo"
    python bench/equal_tokens.py ... --results FILE --table     prints what the file has

A byte-level transformer trains on the source of Python's standard library, on a virtual cluster in
one process. Each node has its own part of the text, and takes a batch of the same size at every
step, so all methods see as many tokens. The table has the validation loss in nats of the mean of
the nodes, the mean over the seeds, its least and its largest; that of DiLoCo's anchor; the loss
relative to data parallel training with the same seed, of the anchor where there is one; and the
megabytes that a node sends. jdaso.perf predicts the time of the training on a link, from the
seconds of a node's step without exchanges. Each result is appended to the file of --results at
once, and what the file has is not trained again, so that the script can be stopped at any time.

    bench/lab/lab.py run --pin -- python bench/equal_tokens.py speed --width 128 --context 128

measures tokens per second of the same model over MPI, on one core of each node. A pair has two
periods of steps without exchanges and three with them. The first of these three is not timed, so
that an exchange is in flight when the timed steps begin. The slowest node counts in both. The table
has the median of the pairs' ratios of tokens per second, its range, the mean time for which an
exchange blocks training on the slowest node, and the megabytes that a node sends at each step.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from machine import Results, header, keep_memory, machine, own_core, row
from step import ReportTotals, apply_gradients, pair, ratio_cells, timed

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "papers"))

from language import text, transformer

import jdaso
from jdaso import perf

CHUNK = 30  # steps in one call of the compiled program
TEST_BATCH = 32  # sequences
#: Options that change what a training finds.
SIZES = ("steps", "outer_rate", "layers", "width", "heads", "context", "batch_size")
SIZES += ("learning_rate", "test_tokens")


class Method(NamedTuple):
    """An algorithm: ``exchange -> averaging``, and what its cost depends on."""

    name: str
    averaging: Callable[[jdaso.Exchange], Any]
    period: int
    delay: int
    wire: str = "float32"
    fragments: int = 1


class Outcome(NamedTuple):
    """What a training found.

    Attributes:
        mean: Validation loss of the mean of the nodes.
        anchor: Validation loss of the anchor, or None for a method without one.
        seconds: Time of the training on this machine, compilation included.
    """

    mean: float
    anchor: float | None
    seconds: float

    @property
    def evaluated(self) -> float:
        """The loss that is compared."""
        return self.mean if self.anchor is None else self.anchor


def data_parallel() -> Method:
    """The method with which the others are compared."""
    return Method("data parallel", lambda x: jdaso.allreduce_gradients(x, wire="float32"), 1, 0)


def methods(options: argparse.Namespace, exchange_seconds: float) -> list[Method]:
    """The rows of the table."""
    period, fragments, warmups = options.period, options.fragments, options.warmup
    cut = transformer.strided_fragments(fragments)
    outer = optax.sgd(options.outer_rate, momentum=0.9, nesterov=True)
    hidden = perf.hiding_schedule(options.step_seconds, exchange_seconds)

    def diloco(warmup: int) -> Method:
        name = f"DiLoCo, warm-up {warmup}"
        return Method(name, lambda x: jdaso.diloco(x, period, outer, warmup=warmup), period, 0)

    def streaming(delay: int, wire: str) -> Method:
        late = {"delay": delay, "mix": 0.5, "fragments": cut, "wire": wire, "warmup": warmups[-1]}
        return Method(
            f"Streaming DiLoCo, warm-up {warmups[-1]}",
            lambda x: jdaso.diloco(x, period, outer, **late),
            *(period, delay, wire, fragments),
        )

    return [
        data_parallel(),
        Method("local SGD", lambda x: jdaso.local_sgd(x, period), period, 0),
        *(diloco(warmup) for warmup in warmups),
        *(streaming(delay, wire) for wire in options.wires for delay in options.delays),
        Method("DASO", lambda x: jdaso.daso(x, *hidden), *hidden),
        Method("DaSGD", lambda x: jdaso.dasgd(x, *hidden), *hidden),
    ]


class Problem:
    """Text and model, and what trains and evaluates them."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.text = text.load("python", text.byte_tokenizer())
        self.shape = transformer.Shape(
            256, options.layers, options.width, options.heads, 8 * options.width // 3
        )
        model = transformer.Transformer(self.shape, nnx.Rngs(0))
        self.graphdef, params = nnx.split(model)
        self.sizes = {path: x.size for path, x in jax.tree_util.tree_leaves_with_path(params)}
        self.parameters = sum(self.sizes.values())
        data = text.dataset(self.text, options.context, 10**5, options.test_tokens)
        self.test = np.stack(
            [
                np.append(x, y[-1:])
                for x, y in (data.test.load(i, None) for i in range(data.test.size))
            ]
        )
        self.evaluate = jax.jit(self.loss)

    def fragment_sizes(self, count: int) -> list[int]:
        """The number of parameters in each fragment."""
        index = transformer.strided_fragments(count) if count > 1 else lambda path: 0
        sizes = [0] * count
        for path, size in self.sizes.items():
            sizes[index(path)] += size
        return sizes

    def loss(self, params: Any, windows: jax.Array) -> jax.Array:
        logits = nnx.merge(self.graphdef, params)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    def test_loss(self, params: Any) -> float:
        parts = np.array_split(self.test, -(-len(self.test) // TEST_BATCH))
        sizes = [len(part) for part in parts]
        return float(np.average([self.evaluate(params, part) for part in parts], weights=sizes))

    def windows(self, rng: np.random.Generator, nodes: int) -> np.ndarray:
        """Sequences of ``CHUNK`` steps, each node's from its own part of the text."""
        options, part = self.options, len(self.text.train) // nodes
        shape = (CHUNK, nodes, options.batch_size)
        starts = rng.integers(part - options.context - 1, size=shape)
        starts += part * np.arange(nodes)[:, None]
        return self.text.train[starts[..., None] + np.arange(options.context + 1)].astype(np.int32)

    def optimizer(self, steps: int) -> optax.GradientTransformation:
        """AdamW, whose learning rate rises and falls."""
        peak = self.options.learning_rate
        rate = optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps, 0.05 * peak)
        adamw = optax.adamw(
            rate, b2=0.99, weight_decay=0.1, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
        )
        return optax.chain(optax.clip_by_global_norm(1.0), adamw)

    def train(self, method: Method, nodes: int, seed: int) -> Outcome:
        """Trains all nodes to the end."""
        begin, steps = time.perf_counter(), self.options.steps // CHUNK * CHUNK
        averaging = method.averaging(jdaso.axis_exchange("node", nodes))
        tx = jdaso.chain(self.optimizer(steps), averaging)

        def step(carry, batch):
            params, opt_state = carry
            loss, grads = jax.value_and_grad(self.loss)(params, batch)
            return jdaso.apply_gradients(tx, grads, opt_state, params, value=loss), loss

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def compiled(params, opt_state, batches):
            on_nodes = jax.vmap(step, axis_name="node")
            return jax.lax.scan(on_nodes, (params, opt_state), batches)[0]

        def end(params, opt_state):
            if method.period > 1:
                params, opt_state = jdaso.drain(tx, opt_state, params)
            anchor = params
            if "DiLoCo" in method.name:
                anchor = jdaso.diloco_anchor(opt_state, params)
            return params, anchor

        model = transformer.Transformer(self.shape, nnx.Rngs(seed))
        params = nnx.state(model, nnx.Param)
        params = jax.tree.map(lambda x: jnp.stack([x] * nodes), params)
        opt_state = jax.vmap(tx.init, axis_name="node")(params)
        rng = np.random.default_rng(seed)
        for _ in range(steps // CHUNK):
            params, opt_state = compiled(params, opt_state, self.windows(rng, nodes))
        ends = jax.jit(jax.vmap(end, axis_name="node"))(params, opt_state)
        mean, anchor = (
            self.test_loss(jax.tree.map(lambda x: x.mean(axis=0), each)) for each in ends
        )
        seconds = round(time.perf_counter() - begin, 1)
        return Outcome(mean, anchor if "DiLoCo" in method.name else None, seconds)


def megabytes(method: Method, problem: Problem, nodes: int) -> float:
    """Megabytes that a node sends in the whole training."""
    sent = 2 * (nodes - 1) / nodes * perf.wire_bytes(problem.parameters, method.wire)
    return sent * (problem.options.steps // method.period) / 1e6


def seconds(method: Method, problem: Problem, nodes: int) -> float:
    """The predicted time of the training on the link. Each fragment is an exchange."""
    options = problem.options
    alone, rule = options.step_seconds, (method.period, method.delay)
    sizes = problem.fragment_sizes(method.fragments)
    exchanges = [exchange_seconds(options, size, nodes, method.wire) for size in sizes]
    waiting = sum(perf.mean_step_time(alone, exchange, *rule) - alone for exchange in exchanges)
    return options.steps * (alone + waiting)


def exchange_seconds(options: argparse.Namespace, size: int, nodes: int, wire: str) -> float:
    """The predicted time of an exchange of a number of parameters."""
    network = perf.Network(latency=1e-3, bandwidth=options.mbit * 1e6 / 8)
    return perf.allreduce_time(perf.wire_bytes(size, wire), nodes, network=network)


def description(method: Method, nodes: int, seed: int, problem: Problem) -> dict[str, Any]:
    """All that the outcome of a training depends on."""
    of_method = {k: v for k, v in method._asdict().items() if k != "averaging"}
    sizes = {k: getattr(problem.options, k) for k in SIZES}
    return {**of_method, "nodes": nodes, "seed": seed, **sizes, "text": problem.text.fingerprint}


def chosen(problem: Problem, nodes: int) -> list[Method]:
    """The methods of --only."""
    options = problem.options
    found = methods(options, exchange_seconds(options, problem.parameters, nodes, "float32"))
    return [method for method in found if re.search(options.only, method.name)]


def loss_row(method: Method, problem: Problem, nodes: int, results: Results) -> str | None:
    """A row of the table, or None if no seed has a result."""

    def by_seed(method: Method) -> dict[int, Outcome]:
        seeds = range(problem.options.seeds)
        keys = {seed: description(method, nodes, seed, problem) for seed in seeds}
        found = {seed: results.get(key) for seed, key in keys.items()}
        return {seed: Outcome(*result) for seed, result in found.items() if result}

    outcomes, baseline = by_seed(method), by_seed(data_parallel())
    if not outcomes:
        return None
    losses = [outcome.mean for outcome in outcomes.values()]
    anchors = [outcome.anchor for outcome in outcomes.values() if outcome.anchor is not None]
    gaps = [x.evaluated / baseline[s].evaluated - 1 for s, x in outcomes.items() if s in baseline]
    cells = [nodes, method.name, method.period, method.delay, method.wire, len(losses)]
    cells += [f"{x:.4f}" for x in (np.mean(losses), min(losses), max(losses))]
    cells += [f"{np.mean(anchors):.4f}" if anchors else "-"]
    cells += [f"{np.mean(gaps):+.1%}" if gaps else "-"]
    cells += [f"{megabytes(method, problem, nodes):.0f}", f"{seconds(method, problem, nodes):.0f}"]
    return row(*cells)


def print_losses(options: argparse.Namespace) -> None:
    """Trains what the file of results lacks, and prints the table of losses."""
    problem, results = Problem(options), Results(options.results)
    of_nodes = {nodes: chosen(problem, nodes) for nodes in options.nodes}
    trainings = [(n, s, m) for n in of_nodes for s in range(options.seeds) for m in of_nodes[n]]
    for nodes, seed, method in [] if options.table else trainings:
        key = description(method, nodes, seed, problem)
        if results.get(key) is None:
            results.add(key, [*problem.train(method, nodes, seed)])
            print(results.get(key), key, file=sys.stderr, flush=True)
    print(machine())
    print(
        f"{problem.parameters} parameters, {options.steps} steps of {options.batch_size} x "
        f"{options.context} bytes a node\n"
    )
    names = ("nodes", "method", "period", "delay", "wire", "seeds", "loss", "least", "largest")
    names += ("anchor's loss", "over data parallel", "MB sent", "predicted, s")
    print(header(*names))
    for nodes, methods in of_nodes.items():
        rows = (loss_row(method, problem, nodes, results) for method in methods)
        print(*(text for text in rows if text is not None), sep="\n")


def print_speed(options: argparse.Namespace) -> None:
    """Tokens per second with exchanges over MPI, and without."""
    os.environ.setdefault("NPROC", "16")
    own_core()
    keep_memory()
    topology, problem = jdaso.discover_topology(processes_per_node=1), Problem(options)
    comm, nodes = topology.comm.Dup(), topology.num_nodes
    say = print if topology.rank == 0 else lambda *_, **__: None
    params = nnx.state(transformer.Transformer(problem.shape, nnx.Rngs(0)), nnx.Param)
    batch = problem.windows(np.random.default_rng(topology.node), nodes)[0, topology.node]
    tokens, steps = options.batch_size * options.context * nodes, 2 * options.period
    adamw = problem.optimizer(options.steps)

    def prepare(tx: Any) -> Callable[[int], float]:
        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, opt_state, batch):
            value, grads = jax.value_and_grad(problem.loss)(params, batch)
            return apply_gradients(tx, grads, opt_state, params, value=value)

        run = timed(step, [jax.tree.map(jnp.copy, params), tx.init(params)], batch)
        run(options.period + 6)  # compilation, and the first use of memory
        return run

    alone = prepare(adamw)
    say(machine())
    say(
        f"{nodes} nodes, one core each; {problem.parameters} parameters, "
        f"{options.pairs} pairs of {steps} steps\n"
    )
    names = ("method", "period", "delay", "wire", "alone, tokens/s", "with", "ratio", "range")
    say(header(*names, "blocked, ms", "MB per step"))
    for method in chosen(problem, nodes):
        exchange = jdaso.mpi_exchange(topology)
        within = prepare(jdaso.chain(adamw, method.averaging(exchange)))
        totals = ReportTotals(exchange)
        measure = functools.partial(pair, comm, exchange, totals, alone, within)
        found = [measure(steps, options.period) for _ in range(options.pairs)]
        rates = [[tokens / seconds for seconds in both] for both in found]
        medians = (f"{statistics.median(each):.0f}" for each in zip(*rates, strict=True))
        blocked = 1e3 * max(comm.allgather(totals.per_exchange("seconds_blocked")))
        sent = totals["bytes_sent"] / options.pairs / steps / 1e6
        cells = *medians, *ratio_cells(rates)
        about = method.name, method.period, method.delay, method.wire
        say(row(*about, *cells, f"{blocked:.1f}", f"{sent:.3f}"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("loss", "speed"), default="loss")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6000, help="200 rounds of 30 steps")
    parser.add_argument("--period", type=int, default=30, help="of DiLoCo and local SGD")
    parser.add_argument("--delays", type=int, nargs="+", default=[1, 5], help="of Streaming")
    parser.add_argument(
        "--wires", nargs="+", default=["float32", "int8", "float4"], help="of Streaming"
    )
    parser.add_argument("--outer-rate", type=float, default=0.6)
    parser.add_argument(
        "--warmup", type=int, nargs="+", default=[0, 10], help="rounds; of Streaming, the last"
    )
    parser.add_argument("--fragments", type=int, default=2, help="of Streaming")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--test-tokens", type=int, default=2**16)
    parser.add_argument("--step-seconds", type=float, default=0.1, help="of a node, alone")
    parser.add_argument("--mbit", type=float, default=200, help="of the link, Mbit/s")
    parser.add_argument("--only", default="", help="regular expression for the methods")
    parser.add_argument("--results", type=Path, help="file that keeps the results")
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs, of the speed")
    options = parser.parse_args()
    {"loss": print_losses, "speed": print_speed}[options.part](options)


if __name__ == "__main__":
    main()
