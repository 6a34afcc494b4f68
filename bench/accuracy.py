"""Accuracy at the end of training: a small CNN on CIFAR-10, on a virtual cluster of 8 nodes.

    python bench/accuracy.py --data cifar10 [--seeds 3] [--epochs 20] [--results FILE]
    python bench/accuracy.py --data cifar10 --results FILE --table      prints what the file has

All methods take the same number of steps with the same learning rate and momentum. As in Table I
of the DaSGD paper, the learning rate rises for 30 % of the steps and then falls. No hyperparameters
are tuned for one of the methods, but one row has the learning rate 1 / (1 - w s / k) times as high,
see jdaso.perf.discarded. ``--data`` is a folder with train/<class>/*.jpg and
test/<class>/*.jpg. Each result is appended to the file of --results at once, and what the file has
is not trained again. Differences have the standard error of their mean over the seeds.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optax
from machine import Results, header, machine, row

import jdaso
from jdaso import perf

sys.path.append(str(Path(__file__).parents[1] / "examples" / "papers"))
import study

WIDTHS = (16, 32, 64)
PEAK, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
SYNCHRONOUS, BLOCKING = "synchronous", "local SGD 4"
#: With a learning rate that would make up for the progress that merges discard.
FASTER = "DASO 2/1, higher rate"
#: Options that change what a training finds.
SIZES = ("nodes", "batch_size", "epochs", "size")


def methods(steps: int, epochs: int) -> dict[str, Callable[[jdaso.Exchange], jdaso.Averaging]]:
    """The averaging of each method. ``FASTER`` trains with a higher learning rate."""
    tenth = steps // 10
    cycling = jdaso.cycling(
        period=4, warmup=tenth, cooldown=tenth, total=steps, epoch=steps // epochs
    )
    return {
        SYNCHRONOUS: lambda x: jdaso.allreduce_gradients(x, wire="float32"),
        BLOCKING: lambda x: jdaso.local_sgd(x, 4),
        "DASO 4/1, delta": lambda x: jdaso.daso(x, 4, 1, merge="delta"),
        "DASO 4/3, delta": lambda x: jdaso.daso(x, 4, 3, merge="delta"),
        "DASO, cycling 4": lambda x: jdaso.daso(x, schedule=cycling),
        "DASO 2/1": lambda x: jdaso.daso(x, 2, 1),
        FASTER: lambda x: jdaso.daso(x, 2, 1),
        "DASO 2/1, int8": lambda x: jdaso.daso(x, 2, 1, wire="int8"),
        "DASO 2/1, float4": lambda x: jdaso.daso(x, 2, 1, wire="float4"),
        "DaSGD 2/1": lambda x: jdaso.dasgd(x, 2, 1),
        "DaSGD 4/1": lambda x: jdaso.dasgd(x, 4, 1),
        "DiLoCo 30": lambda x: jdaso.diloco(x, 30, warmup=10),
    }


def local_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    """SGD with momentum and a learning rate that rises to a peak and falls."""
    rise = 3 * steps // 10
    low = peak / 100
    learning_rate = optax.join_schedules(
        [optax.linear_schedule(low, peak, rise), optax.linear_schedule(peak, low, steps - rise)],
        [rise],
    )
    return optax.chain(
        optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(learning_rate, momentum=MOMENTUM)
    )


def result_row(name: str, keys: dict[str, list[dict]], results: Results) -> str | None:
    """A row of the table, or None if no seed has a result."""
    found = [results.get(key) for key in keys[name]]
    ends = [result for result in found if result]
    if not ends:
        return None
    accuracies, losses = np.transpose(ends)
    gaps = []
    for other in (SYNCHRONOUS, BLOCKING):
        both = zip(found, map(results.get, keys[other]), strict=True)
        points = np.array([100 * (a[0] - b[0]) for a, b in both if a and b])
        error = f" ± {points.std(ddof=1) / len(points) ** 0.5:.2f}" if len(points) > 1 else ""
        gaps.append(f"{points.mean():+.2f}{error}" if len(points) and other != name else "-")
    cells = [name, len(ends), *(f"{100 * f(accuracies):.2f}" for f in (np.mean, np.min, np.max))]
    return row(*cells, *gaps, f"{losses.mean():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("cifar10"), help="folder of images")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="images per node and step")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images")
    parser.add_argument("--size", type=int, default=16, help="pixels of an edge of the images")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--only", default="", help="regular expression for the methods")
    parser.add_argument("--results", type=Path, help="file that keeps the results")
    parser.add_argument("--table", action="store_true", help="train nothing")
    options = parser.parse_args()
    if not options.data.is_dir():
        print(f"skipped: --data {options.data} does not exist; give a folder with train/ and test/")
        return
    data = study.folder(options.data, options.size)
    steps = len(study.batches(len(data.labels), options.nodes, options.batch_size, options.epochs))
    model = study.SmallCNN(WIDTHS, num_classes=int(data.labels.max()) + 1)
    results = Results(options.results)
    rates = {FASTER: PEAK / (1 - perf.discarded("daso", 2, 1, options.nodes))}
    averagings = methods(steps, options.epochs)
    sizes = {name: getattr(options, name) for name in SIZES}
    seeds = range(options.seeds)
    keys = {name: [{"method": name, "seed": s, **sizes} for s in seeds] for name in averagings}
    for seed in [] if options.table else seeds:
        for name, averaging in averagings.items():
            if results.get(keys[name][seed]) or not re.search(options.only, name):
                continue
            begin = time.perf_counter()
            local = local_optimizer(steps, rates.get(name, PEAK))
            ended = study.train(
                data,
                lambda x, local=local, averaging=averaging: jdaso.chain(local, averaging(x)),
                *(options.nodes, options.batch_size, options.epochs, seed),
                model=model,
            )
            loss = float(ended.losses[-steps // options.epochs :].mean())
            results.add(keys[name][seed], [ended.accuracy, loss])
            print(f"{name}, seed {seed}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    print(f"{machine()}; {options.nodes} nodes, {options.batch_size} images per node and step, ")
    print(f"{options.size} x {options.size} pixels, {steps} steps\n")
    others = f"over {SYNCHRONOUS}", f"over {BLOCKING}"
    print(header("method", "seeds", "accuracy, %", "least", "largest", *others, "last loss"))
    for name in averagings:
        if text := result_row(name, keys, results):
            print(text)


if __name__ == "__main__":
    main()
