"""Compares time and accuracy of SGD, ASSM, PASSM and PASSM+: Figure 1 of passm in small.

    mpiexec -n 4 python examples/papers/passm.py [--epochs 30] [--seeds 3] [--plot passm.png]

All methods use the same number of samples, and all but one row use minibatches of the same size.
The learning rate drops to a tenth after 50 % and 75 % of the samples, as in the paper. SGD uses one
process while the others sleep. The times contain neither compilation nor evaluations.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("NPROC", "16")

import jax
import numpy as np
import optax
import study

import jdaso
from jdaso import passm

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from machine import machine

WIDTHS = (64, 128, 256)
RATE, MOMENTUM, DECAY, DAMPENING, DROPS = 0.02, 0.9, 5e-4, 0.1, (0.5, 0.75)


class Epoch(NamedTuple):
    """Results at the end of an epoch: training time so far, training loss, test accuracy."""

    seconds: float
    loss: float
    accuracy: float


class Bench:
    """The processes, the data, and the model."""

    def __init__(self, epochs: int, batch_size: int):
        self.topology = jdaso.discover_topology(processes_per_node=1)
        self.comm, self.count = self.topology.comm, len(self.topology.processes)
        self.data = study.digits()
        self.model = study.SmallCNN(widths=WIDTHS)
        self.epochs, self.batch_size = epochs, batch_size
        self.one = self.data.images[:batch_size], self.data.labels[:batch_size]

    def loss_fn(self, params, images, labels):
        logits = self.model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def params(self, seed: int):
        return self.model.init(jax.random.key(seed), self.data.images[:1])

    def batches(self, part: int, parts: int, batch_size: int, seed: int) -> Iterator[list]:
        """Yields for each epoch the minibatches of process ``part`` of ``parts``."""
        for epoch in range(self.epochs):
            rows = passm.minibatches(len(self.data.labels), [batch_size] * parts, epoch, seed)
            yield [(self.data.images[i], self.data.labels[i]) for i in rows[part]]

    def rate(self, epoch_steps: int) -> Callable[[int], float]:
        """The step size of ``optax.sgd``. That of Algorithm 1 is larger by 1 / (1 - m)."""
        drops = [share * self.epochs * epoch_steps for share in DROPS]
        return lambda step: RATE * DAMPENING ** sum(step >= drop for drop in drops)

    def accuracy(self, params) -> float:
        return study.accuracy(self.model, params, self.data.test_images, self.data.test_labels)

    def sgd(self, seed: int, times: int = 1) -> list[Epoch]:
        """Trains in one process. Minibatches and peak learning rate are larger by ``times``."""
        batch_size, params = times * self.batch_size, self.params(seed)
        epoch_steps = len(self.data.labels) // batch_size
        dropping, rising = self.rate(epoch_steps), max(1, self.epochs // 10) * epoch_steps
        tx = optax.chain(optax.add_decayed_weights(DECAY), optax.trace(MOMENTUM))

        @jax.jit
        def step(params, state, rate, images, labels):
            loss, grads = jax.value_and_grad(self.loss_fn)(params, images, labels)
            updates, state = tx.update(grads, state, params)
            params = jax.tree.map(lambda x, u: x - rate * u, params, updates)
            return params, state, loss

        state, taken, seconds, found = tx.init(params), itertools.count(), 0.0, []
        first = [x[:1].repeat(batch_size, axis=0) for x in self.one]
        jax.block_until_ready(step(params, state, 0.0, *first))
        for epoch in self.batches(0, 1, batch_size, seed):
            start, losses = time.perf_counter(), []
            for batch in epoch:
                k = next(taken)
                warm = 1 + (times - 1) * min(1.0, (k + 1) / rising)
                params, state, loss = step(params, state, dropping(k) * warm, *batch)
                losses.append(loss)
            jax.block_until_ready(params)
            seconds += time.perf_counter() - start
            found.append(Epoch(seconds, float(np.mean(losses)), self.accuracy(params)))
        return found

    def shared(self, seed: int, method: Callable) -> list[Epoch]:
        """Trains in all processes, which synchronize only at the ends of epochs."""
        params, rank = self.params(seed), self.topology.rank
        memory = passm.shared_memory(self.topology, params)
        order = passm.order_of_use(self.loss_fn, params, *self.one)
        blocks = passm.partition(params, self.count, order)
        epoch_steps = len(self.data.labels) // (self.count * self.batch_size)
        rate = self.rate(epoch_steps)
        options = {}
        if method is passm.passm_plus:
            total = self.epochs * epoch_steps
            options["switches"] = passm.switches_around([round(d * total) for d in DROPS], total)
        training = method(
            memory,
            blocks,
            self.loss_fn,
            lambda step: rate(step) / (1 - MOMENTUM),
            MOMENTUM,
            before=optax.add_decayed_weights(DECAY),
            **options,
        )
        state, seconds, found = training.init(*self.one), 0.0, []
        for epoch in self.batches(rank, self.count, self.batch_size, seed):
            memory.barrier()
            start, losses = time.perf_counter(), []
            for batch in epoch:
                state, loss = training.step(state, *batch)
                losses.append(loss)
            params = passm.settled(memory)
            seconds += time.perf_counter() - start
            loss = np.mean(self.comm.allgather(float(np.mean(losses))))
            found.append(Epoch(seconds, float(loss), self.accuracy(params) if rank == 0 else 0.0))
        assert state.skipped == 0, f"{state.skipped} steps were not finite"
        return found

    def backward(self) -> list[float]:
        """XLA's count of operations in each block's backward pass, over that of a whole one."""
        params = self.params(0)

        def operations(function):
            return jax.jit(function).lower(params, *self.one).compile().cost_analysis()["flops"]

        order = passm.order_of_use(self.loss_fn, params, *self.one)
        blocks = passm.partition(params, self.count, order)
        forward = operations(self.loss_fn)
        whole = operations(jax.value_and_grad(self.loss_fn)) - forward
        restricted = [passm.restricted_value_and_grad(self.loss_fn, block) for block in blocks]
        return [(operations(function) - forward) / whole for function in restricted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images")
    parser.add_argument("--batch-size", type=int, default=32, help="images of a minibatch")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--plot", help="file for a plot over time and epochs")
    options = parser.parse_args()
    bench = Bench(options.epochs, options.batch_size)
    waiting = passm.shared_memory(bench.topology, {"nothing": np.zeros(1, "f4")})
    first = bench.topology.rank == 0
    large = f"SGD, batch {bench.count * options.batch_size}"

    def alone(train):
        """Trains in the first process while the others sleep."""
        found = train() if first else []
        waiting.barrier()
        return found

    methods = {
        "SGD": lambda seed: alone(lambda: bench.sgd(seed)),
        large: lambda seed: alone(lambda: bench.sgd(seed, times=bench.count)),
        "ASSM": lambda seed: bench.shared(seed, passm.assm),
        "PASSM": lambda seed: bench.shared(seed, passm.passm),
        "PASSM+": lambda seed: bench.shared(seed, passm.passm_plus),
    }
    found = {
        name: [train(seed) for seed in range(options.seeds)] for name, train in methods.items()
    }
    if not first:
        return
    print(machine())
    print(
        f"{bench.count} processes, digits, SmallCNN{WIDTHS}, batch {options.batch_size}, "
        f"{options.epochs} epochs, {options.seeds} seeds"
    )
    shares = bench.backward()
    print(
        "backward passes of the blocks, as fractions of a whole one: "
        f"{', '.join(f'{share:.2f}' for share in shares)}; saved {1 - np.mean(shares):.2f}, "
        f"passm Appendix D {(bench.count - 1) / (2 * bench.count):.2f}"
    )
    print("| | test accuracy, mean (of each seed) | last training loss | seconds | SGD's over it |")
    print("|---|---|---|---|---|")
    usual = np.mean([run[-1].seconds for run in found["SGD"]])
    for name, runs in found.items():
        last = [run[-1] for run in runs]
        seeds = ", ".join(f"{epoch.accuracy:.4f}" for epoch in last)
        seconds = np.mean([epoch.seconds for epoch in last])
        print(
            f"| {name} | {np.mean([e.accuracy for e in last]):.4f} ({seeds}) | "
            f"{np.mean([e.loss for e in last]):.4f} | {seconds:.1f} | {usual / seconds:.2f} |"
        )
    if options.plot:
        plot(found, options.plot)


def plot(found: dict[str, list[list[Epoch]]], path: str) -> None:
    """Draws training loss and test error over time and over epochs, averaged over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for name, runs in found.items():
        seconds, losses, accuracies = np.mean(np.array(runs), axis=0).T
        epochs = np.arange(1, len(seconds) + 1)
        for column, x in enumerate((seconds, epochs)):
            axes[0, column].semilogy(x, losses, label=name)
            axes[1, column].plot(x, 1 - accuracies)
            axes[1, column].set_yscale("log")
    axes[0, 0].set(ylabel="training loss")
    axes[1, 0].set(ylabel="test error", xlabel="seconds")
    axes[1, 1].set(xlabel="epochs")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
