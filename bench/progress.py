"""How many steps of synchronous training a step of each setting is worth, on six small tasks.

    python bench/progress.py --cifar cifar10 --results FILE [--nodes 2 8] [--seeds 3] [--steps 240]
    python bench/progress.py --results FILE --table     prints what the file has
    python bench/progress.py --quick                    two tasks, one seed, five minutes
    python bench/progress.py --own ...                  each setting at its own best rate
    python bench/progress.py --full ...                 also wires, 4 nodes, and other merges

All nodes of a virtual cluster train from the same parameters, each on its own batches. A setting is
compared with synchronous training from the same start on the same batches: if its loss after s
steps is that of synchronous training after n steps, its progress is n / s. It is the mean over the
last third of the training. The loss is that of the mean of the nodes on fixed training examples.

Each setting has the learning rate of its user: the one of seven with which synchronous training
ends with the lowest loss, half of it, and a quarter of it. Its local optimizer is the same. With
``--own`` it has all seven, and the table shows the best of them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
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
from jax import lax
from jax.flatten_util import ravel_pytree
from machine import Results, header, machine, row

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "papers"))

from image_folders import digits, folder
from language import text, transformer

import jdaso
from jdaso.algorithms.daso import mean_weight
from jdaso.core import Arrival, Merge

AXIS = "node"
EVERY = 4  # steps between two evaluations
LONGER = 1.5  # synchronous training takes so many times as many steps
EVALUATED = 256  # examples
SHARES = (1.0, 0.5, 0.25)  # of the best learning rate of synchronous training
SEARCHED = tuple(2.0**k for k in range(-3, 4))  # times the rate of the task
PyTree = Any


class Task(NamedTuple):
    """What is trained.

    Attributes:
        inputs, targets: the examples.
        init: ``key -> params``.
        loss: ``(params, inputs, targets) -> float``, the mean over examples.
        optimizer: ``learning rate -> optax transformation``.
        rate: the middle of the learning rates that are tried.
        batch: examples per node and step.
        vectorized: whether nodes and trainings are computed together. XLA computes convolutions
            faster one by one.
    """

    inputs: np.ndarray
    targets: np.ndarray
    init: Callable[[jax.Array], PyTree]
    loss: Callable[[PyTree, jax.Array, jax.Array], jax.Array]
    optimizer: Callable[[Any], optax.GradientTransformation]
    rate: float
    batch: int = 16
    vectorized: bool = True


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def of_module(make: Callable[[nnx.Rngs], nnx.Module], loss=cross_entropy):
    """``init`` and ``loss`` of a Task, for a module that maps inputs to logits."""
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, _, statistics = nnx.split(abstract, nnx.Param, ...)
    # Batch statistics are only written, because batches are normalized by themselves.
    statistics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), statistics)

    def init(key):
        return nnx.to_pure_dict(nnx.split(make(nnx.Rngs(key)), nnx.Param, ...)[1])

    def loss_fn(params, inputs, targets):
        state = nnx.state(abstract, nnx.Param)
        nnx.replace_by_pure_dict(state, params)
        return loss(nnx.merge(graph, state, statistics, copy=True)(inputs), targets)

    return init, loss_fn


class MLP(nnx.Module):
    """Two layers of 64 units."""

    def __init__(self, inputs: int, outputs: int, rngs: nnx.Rngs):
        sizes = (inputs, 64, 64, outputs)
        self.layers = nnx.List(nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(sizes))

    def __call__(self, x):
        *layers, last = self.layers
        return last(functools.reduce(lambda x, layer: nnx.tanh(layer(x)), layers, x))


class GRU(nnx.Module):
    """Reads an image row by row, and names the digit after the last one."""

    def __init__(self, rngs: nnx.Rngs):
        self.gates = nnx.Linear(8 + 32, 2 * 32, rngs=rngs)
        self.candidate = nnx.Linear(8 + 32, 32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        def read(h, row):
            keep, reset = jnp.split(nnx.sigmoid(self.gates(jnp.concatenate([row, h], -1))), 2, -1)
            new = nnx.tanh(self.candidate(jnp.concatenate([row, reset * h], -1)))
            return keep * h + (1 - keep) * new, None

        rows = jnp.moveaxis(x.reshape(-1, 8, 8), 1, 0)
        return self.head(lax.scan(read, jnp.zeros((len(x), 32)), rows)[0])


class CNN(nnx.Module):
    """Two convolutions and a linear classifier."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 16, (3, 3), strides=2, rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.head(x.reshape(len(x), -1))


class ResNet(nnx.Module):
    """Three residual blocks with BatchNorm."""

    def __init__(self, rngs: nnx.Rngs):
        conv = functools.partial(nnx.Conv, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.stem = conv(1, 16)
        self.blocks = nnx.List(
            nnx.List([conv(16, 16), nnx.BatchNorm(16, rngs=rngs)]) for _ in range(3)
        )
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x.reshape(-1, 8, 8, 1))
        for conv, norm in self.blocks:
            x = x + nnx.relu(norm(conv(x), use_running_average=False))
        return self.head(x.mean(axis=(1, 2)))


def regression():
    """Values of a network with random parameters, and noise."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(4096, 16)).astype(np.float32)
    hidden = np.tanh(inputs @ rng.normal(size=(16, 32)) / 2)
    values = hidden @ rng.normal(size=(32, 1)) / 4 + 0.1 * rng.normal(size=(4096, 1))
    return inputs, values.astype(np.float32)


def sequences(length: int = 32, count: int = 16384):
    """Pieces of the source of Python's standard library, and the bytes that follow."""
    tokens = text.load("python", text.byte_tokenizer()).train
    starts = np.random.default_rng(0).integers(0, len(tokens) - length - 1, count)
    pieces = np.stack([tokens[i : i + length + 1] for i in starts]).astype(np.int32)
    return pieces[:, :-1], pieces[:, 1:]


def tasks(cifar: Path | None) -> dict[str, Callable[[], Task]]:
    """The tasks. Their data are loaded when they are asked for."""

    def flat():
        data = digits()
        return data.images.reshape(-1, 64).astype(np.float32) / 127.5 - 1, data.labels

    def momentum(rate):
        return optax.sgd(rate, 0.9)

    def images():
        data = folder(cifar, 16)
        return data.images.astype(np.float32) / 127.5 - 1, data.labels

    shape = transformer.Shape(vocabulary=256, layers=2, width=32, heads=2, hidden=64)
    found = {
        "regression": lambda: Task(
            *regression(),
            *of_module(lambda r: MLP(16, 1, r), lambda out, y: jnp.mean((out - y) ** 2)),
            optax.sgd,
            0.1,
            batch=64,
        ),
        "MLP": lambda: Task(*flat(), *of_module(lambda r: MLP(64, 10, r)), momentum, 0.02),
        "GRU": lambda: Task(*flat(), *of_module(GRU), optax.adam, 0.01),
        "ResNet": lambda: Task(*flat(), *of_module(ResNet), momentum, 0.1, vectorized=False),
        "CNN": lambda: Task(*images(), *of_module(CNN), momentum, 0.02, vectorized=False),
        "transformer": lambda: Task(
            *sequences(),
            *of_module(lambda r: transformer.Transformer(shape, r)),
            lambda rate: optax.adamw(rate, weight_decay=0.1),
            0.01,
            batch=8,
            vectorized=False,
        ),
    }
    if cifar is None:
        del found["CNN"]
    return found


def extrapolated(period: int, weight: Callable[[Arrival], Any]) -> Merge:
    """``x <- x + w (m + s / k (m - m_before) - x)``, with the last two means m."""

    def init(params):
        return {"before": jax.tree.map(jnp.zeros_like, params), "known": jnp.zeros(())}

    def merge(leaves, arrival, state):
        before, tree = jax.tree.flatten(state["before"])
        ahead, w = state["known"] * arrival.age / period, weight(arrival)
        expected = [m + ahead * (m - b) for m, b in zip(arrival.mean, before, strict=True)]
        moved = [x + w * (e - x) for x, e in zip(leaves, expected, strict=True)]
        return moved, {"before": tree.unflatten(arrival.mean), "known": jnp.ones(())}

    return Merge(init, merge)


def by_age(arrival: Arrival):
    """DASO's weight."""
    return mean_weight(arrival.members, arrival.age)


def predicted(exchange, period, delay, weight=by_age):
    """An averaging that merges the extrapolated mean."""
    rule = extrapolated(period, weight)
    schedule = jdaso.constant(period, delay)
    return jdaso.core.averaging("extrapolated", exchange, schedule, rule)


def synchronous(exchange):
    return jdaso.allreduce_gradients(exchange, wire="float32")


class Setting(NamedTuple):
    """An algorithm with its options: ``exchange -> averaging``."""

    averaging: Callable[[jdaso.Exchange], Any]
    full: bool = False  # whether only --full has it
    own: bool = False  # whether only --own has it


ALONE, SYNCHRONOUS = "one process alone", "synchronous"
SETTINGS = {
    SYNCHRONOUS: Setting(synchronous, own=True),
    ALONE: Setting(lambda x: jdaso.local_sgd(x, 1)),
    "local_sgd 4/0": Setting(lambda x: jdaso.local_sgd(x, 4)),
    "local_sgd 8/0": Setting(lambda x: jdaso.local_sgd(x, 8)),
    "daso 1/1": Setting(lambda x: jdaso.daso(x, 1, 1)),
    "daso 4/1": Setting(lambda x: jdaso.daso(x, 4, 1)),
    "daso 4/3": Setting(lambda x: jdaso.daso(x, 4, 3)),
    "daso 8/7": Setting(lambda x: jdaso.daso(x, 8, 7)),
    "dasgd 4/1": Setting(lambda x: jdaso.dasgd(x, 4, 1)),
    "dasgd 4/3": Setting(lambda x: jdaso.dasgd(x, 4, 3)),
    "daso 1/1, delta": Setting(lambda x: jdaso.daso(x, 1, 1, merge="delta")),
    "daso 4/1, delta": Setting(lambda x: jdaso.daso(x, 4, 1, merge="delta")),
    "daso 4/3, delta": Setting(lambda x: jdaso.daso(x, 4, 3, merge="delta")),
    "daso 8/7, delta": Setting(lambda x: jdaso.daso(x, 8, 7, merge="delta")),
    "local_sgd 4/3, delta": Setting(lambda x: jdaso.local_sgd(x, 4, 3, "delta")),
    "daso 2/1, delta": Setting(lambda x: jdaso.daso(x, 2, 1, merge="delta")),
    "local_sgd 2/1, delta": Setting(lambda x: jdaso.local_sgd(x, 2, 1, "delta"), full=True),
    "local_sgd 4/1, delta": Setting(lambda x: jdaso.local_sgd(x, 4, 1, "delta"), full=True),
    "local_sgd 8/7, delta": Setting(lambda x: jdaso.local_sgd(x, 8, 7, "delta"), full=True),
    "dasgd 4/3, delta": Setting(lambda x: jdaso.dasgd(x, 4, 3, merge="delta"), full=True),
    "daso 4/3, delta, bfloat16": Setting(
        lambda x: jdaso.daso(x, 4, 3, merge="delta", wire="bfloat16"), full=True
    ),
    "extrapolated 8/7": Setting(lambda x: predicted(x, 8, 7), full=True),
    "extrapolated 4/3": Setting(lambda x: predicted(x, 4, 3), full=True),
    "extrapolated 4/3, w = 0.75": Setting(lambda x: predicted(x, 4, 3, lambda a: 0.75), full=True),
}


class Trainer:
    """Trains one task on a number of nodes, with several learning rates and seeds at a time.

    The program of the gradients serves all settings. That of the optimizer and the averaging is
    small, because the parameters are one array. No optimizer here tells arrays apart.
    """

    def __init__(self, task: Task, nodes: int):
        self.task, self.nodes = task, nodes
        inputs, targets = jnp.asarray(task.inputs), jnp.asarray(task.targets)
        shown = np.random.default_rng(1).choice(len(inputs), EVALUATED, replace=False)
        tree_of = ravel_pytree(task.init(jax.random.key(0)))[1]

        def loss_fn(params, batch):
            return task.loss(tree_of(params), inputs[batch], targets[batch])

        def gradients(params, seed, node, step):
            key = functools.reduce(jax.random.fold_in, (step, node), jax.random.key(seed))
            batch = jax.random.randint(key, (task.batch,), 0, len(inputs))
            return jax.value_and_grad(loss_fn)(params, batch)

        @jax.jit
        def gradients_of_all(params, seeds, step):
            """For parameters of shape (trainings, nodes, ...), all at once."""
            over_nodes = jax.vmap(gradients, in_axes=(0, None, 0, None))
            over_trainings = jax.vmap(over_nodes, in_axes=(0, 0, None, None))
            return over_trainings(params, seeds, jnp.arange(nodes), step)

        self.gradients_of_node = gradients
        gradients_of_one = jax.jit(gradients)

        def one_by_one(params, seeds, step):
            found = [
                gradients_of_one(params[i, node], seed, node, step)
                for i, seed in enumerate(seeds)
                for node in range(nodes)
            ]
            loss, grads = zip(*found, strict=True)
            shape = params.shape[:2]
            return jnp.stack(loss).reshape(shape), jnp.stack(grads).reshape(params.shape)

        self.gradients = gradients_of_all if task.vectorized else one_by_one
        self.start = jax.jit(
            jax.vmap(lambda seed: ravel_pytree(task.init(jax.random.key(seed)))[0])
        )
        evaluate = jax.jit(lambda params: loss_fn(params.mean(axis=0), shown))
        self.evaluate = lambda params: [evaluate(x) for x in params]

    def losses(self, make, rates, seeds, steps: int) -> np.ndarray:
        """The losses of the mean of the nodes every ``EVERY`` steps, for each rate and seed."""
        exchange = jdaso.axis_exchange(AXIS, self.nodes)

        def optimizer(rate):
            return jdaso.chain(self.task.optimizer(rate), make(exchange))

        # Over the trainings, each with its rate, and over the nodes.
        @jax.jit
        @jax.vmap
        def init(rate, params):
            return jax.vmap(optimizer(rate).init, axis_name=AXIS)(params)

        @functools.partial(jax.jit, donate_argnums=(1, 2))
        @jax.vmap
        def apply(rate, params, state, grads, loss):
            def one(params, state, grads, loss):
                return jdaso.apply_gradients(optimizer(rate), grads, state, params, value=loss)

            return jax.vmap(one, axis_name=AXIS)(params, state, grads, loss)

        rates, seeds = jnp.asarray(rates, jnp.float32), jnp.asarray(seeds)
        params = jnp.repeat(self.start(seeds)[:, None], self.nodes, axis=1)
        state, found = init(rates, params), []
        for step in range(1, steps + 1):
            loss, grads = self.gradients(params, seeds, step)
            params, state = apply(rates, params, state, grads, loss)
            if step % EVERY == 0:
                found.append(self.evaluate(params))
        return np.transpose(jax.device_get(found))


def progress(losses: np.ndarray, reference: np.ndarray) -> float:
    """The steps of the reference to the same loss, per step; the mean of the last third.

    The number of evaluations of the reference with a higher loss tells when it reached a loss, also
    where its loss rises in between.
    """
    found = [
        (reference > losses[i]).sum() / (i + 1) if np.isfinite(losses[i]) else 0.0
        for i in range(2 * len(losses) // 3, len(losses))
    ]
    return float(np.mean(found))


def run(options: argparse.Namespace, results: Results) -> None:
    """Trains what the file of results has not."""
    for name, make in tasks(options.cifar).items():
        if not re.search(options.tasks, name):
            continue
        task = make()
        for nodes in options.nodes:
            key = {"task": name, "nodes": nodes, "steps": options.steps}
            longer = int(options.steps * LONGER)
            trainers = {n: Trainer(task, n) for n in (1, nodes)}
            trainer = trainers[nodes]
            best = results.get({**key, "setting": "rate"})
            tried = task.rate * np.array(SEARCHED)
            if best is None:
                losses = trainer.losses(synchronous, tried, [1000] * len(tried), options.steps)
                ends = losses[:, -5:].mean(axis=1)
                best = [float(tried[np.nanargmin(ends)])]
                results.add({**key, "setting": "rate"}, best)
                print(
                    name, nodes, dict(zip(tried.tolist(), ends.tolist(), strict=True)), flush=True
                )
            of_setting = tried if options.own else np.multiply(SHARES, best[0])
            rates, seeds = np.meshgrid(of_setting, np.arange(options.seeds))
            given, reference = (rates.ravel(), seeds.ravel()), None
            for setting, (averaging, full, own_only) in SETTINGS.items():
                left_out = (full and not options.full) or (own_only and not options.own)
                if left_out or not re.search(options.only, setting):
                    continue
                identity = described(setting, name, nodes, options)
                if results.get(identity) is not None:
                    continue
                if reference is None:
                    at = np.full(len(given[0]), best[0]) if options.own else given[0]
                    reference = trainer.losses(synchronous, at, given[1], longer)
                start = time.monotonic()
                of = trainers[1] if setting == ALONE else trainer
                losses = of.losses(averaging, *given, options.steps)
                found = [progress(a, b) for a, b in zip(losses, reference, strict=True)]
                shaped = np.reshape(found, rates.shape).T.tolist()  # by rate, then seed
                means = " ".join(f"{np.mean(x):.2f}" for x in shaped)
                if options.own:
                    shaped = [[r, *of_rate] for r, of_rate in zip(of_setting, shaped, strict=True)]
                results.add(identity, shaped)
                print(
                    f"{name} {nodes} {setting}: {means} ({time.monotonic() - start:.0f} s)",
                    flush=True,
                )


def described(setting: str, name: str, nodes: int, options: argparse.Namespace) -> dict[str, Any]:
    """What identifies the result of a setting on a task."""
    key = {"task": name, "nodes": nodes, "steps": options.steps, "setting": setting}
    return {**key, "seeds": options.seeds, **({"rates": "all"} if options.own else {})}


def measured(
    results: Results, nodes: int, options: argparse.Namespace
) -> dict[str, dict[str, np.ndarray]]:
    """The progress of each setting and task, by rate and seed."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for setting, name in itertools.product(SETTINGS, tasks(Path())):
        result = results.get(described(setting, name, nodes, options))
        if result is not None:
            found.setdefault(setting, {})[name] = np.array(result)
    return found


def table(found: dict[str, dict[str, np.ndarray]], nodes: int) -> list[str]:
    """The rows of the settings, with the mean, an interval of it, and the tasks.

    A cell has the means over the seeds at the three rates. The interval is the 90 % interval of the
    mean over tasks and rates, from the differences between the seeds.
    """
    names = sorted({name for of_tasks in found.values() for name in of_tasks})
    lines = [header(f"{nodes} nodes", "mean", *names)]
    for setting, of_tasks in found.items():
        by_seed = np.mean([values.mean(axis=0) for values in of_tasks.values()], axis=0)
        half = 1.645 * by_seed.std(ddof=1) / np.sqrt(len(by_seed)) if len(by_seed) > 1 else 0.0
        cells = [
            " / ".join(f"{x:.2f}" for x in of_tasks[name].mean(axis=1)) if name in of_tasks else "-"
            for name in names
        ]
        mean = f"{by_seed.mean():.2f} +- {half:.2f}" if len(of_tasks) == len(names) else "-"
        lines.append(row(setting, mean, *cells))
    return lines


def own_table(found: dict[str, dict[str, np.ndarray]], nodes: int) -> list[str]:
    """The rows of the settings, with the progress at their own best rate, and this rate.

    Found are rows of a rate and the progress of each seed.
    """
    names = sorted({name for of_tasks in found.values() for name in of_tasks})
    lines = [header(f"{nodes} nodes", *names)]
    for setting, of_tasks in found.items():
        cells = []
        for name in names:
            rates, values = of_tasks[name][:, 0], of_tasks[name][:, 1:].mean(axis=1)
            cells.append(f"{values.max():.2f} at {rates[values.argmax()]:g}")
        lines.append(row(setting, *cells))
    return lines


def fit(found: dict[str, dict[str, np.ndarray]], nodes: int) -> tuple[np.ndarray, float]:
    """The coefficients of jdaso/algorithms/progress.py, and the error of a task and rate.

    They minimize the squared errors of the progress of all tasks, rates and settings, and are not
    negative.
    """
    rows, values = [], []
    for setting, of_tasks in found.items():
        known = re.fullmatch(r"(local_sgd|daso|dasgd) (\d)/(\d)(, delta)?", setting)
        if known is None:
            continue
        algorithm, period, delay, correction = known.groups()
        k, s = int(period), int(delay)
        taken = 0.0 if correction else jdaso.perf.discarded(algorithm, k, s, nodes)
        for progress in of_tasks.values():
            rows += [[np.log2(k), np.log2(1 + s), taken]] * progress.shape[0]
            values += progress.mean(axis=1).tolist()
    costs, target = np.array(rows), np.array(values)

    def error(coefficients):
        return ((np.exp(-costs @ coefficients) - target) ** 2).sum()

    best = np.zeros(3)
    for step in (0.1, 0.03, 0.01, 0.003, 0.001):  # a descent along the axes
        moved = True
        while moved:
            moved = False
            for change in (*np.eye(3), *-np.eye(3)):
                other = np.maximum(best + step * change, 0)
                if error(other) < error(best):
                    best, moved = other, True
    return best, float(np.sqrt(error(best) / len(target)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--nodes", type=int, nargs="+", default=[2, 8])
    add("--seeds", type=int, default=3)
    add("--steps", type=int, default=240)
    add("--cifar", type=Path, help="folder with train/<class>/*; without it, there is no CNN")
    add("--tasks", default="", help="regular expression for the tasks")
    add("--only", default="", help="regular expression for the settings")
    add("--full", action="store_true", help="all settings")
    add("--quick", action="store_true", help="two tasks, one seed")
    add("--own", action="store_true", help="each setting at its own best learning rate")
    add("--table", action="store_true", help="train nothing")
    add("--results", type=Path, help="file that keeps the results")
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seeds, options.steps, options.nodes = "regr|MLP", 1, 120, [2]
    print(machine(), flush=True)
    results = Results(options.results)
    if not options.table:
        run(options, results)
    for nodes in options.nodes:
        found = measured(results, nodes, options)
        if options.own:
            print("\n" + "\n".join(own_table(found, nodes)))
            continue
        print("\n" + "\n".join(table(found, nodes)))
        if not options.only:
            coefficients, error = fit(found, nodes)
            print(f"\n{nodes} nodes: {np.round(coefficients, 3).tolist()}, error {error:.2f}")


if __name__ == "__main__":
    main()
