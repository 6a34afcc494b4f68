"""Repeats Table I of the DaSGD paper in small: what do rare and delayed means cost in accuracy?

    python bench/dasgd_table1.py --data cifar10

Trains a small CNN on CIFAR-10 on a virtual cluster of 8 nodes. Minibatch SGD, Local SGD (tau 4) and
DaSGD (tau 4, d 1, xi 0.25) take the same number of steps with the same learning rate. As in the
paper, the learning rate rises for 30 % of the steps and then falls, momentum is 0.9, and a node's
batch has 32 images. No hyperparameters are tuned for one of the algorithms. ``--data`` is a folder
with train/<class>/*.jpg and test/<class>/*.jpg.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import optax
from machine import machine

import jdaso

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import study

NODES, BATCH_SIZE = 8, 32
WIDTHS = (16, 32, 64)
PEAK, MOMENTUM, WEIGHT_DECAY = 0.1, 0.9, 5e-4
# Accuracy of ResNet-50 and MobileNetV2, after 2450 steps on 32 workers.
PAPER = {
    "minibatch SGD": (0.9037, 0.9304),
    "Local SGD, tau 4": (0.9062, 0.9241),
    "DaSGD, tau 4, d 1": (0.9088, 0.9304),
}


def algorithms(steps: int):
    """Yields name and ``exchange -> transformation`` of each algorithm."""
    rise = 3 * steps // 10
    learning_rate = optax.join_schedules(
        [
            optax.linear_schedule(PEAK / 100, PEAK, rise),
            optax.linear_schedule(PEAK, PEAK / 100, steps - rise),
        ],
        [rise],
    )
    local = optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(learning_rate, MOMENTUM))
    makers = (
        lambda exchange: jdaso.chain(local, jdaso.allreduce_gradients(exchange, wire="float32")),
        lambda exchange: jdaso.chain(local, jdaso.local_sgd(exchange, period=4)),
        lambda exchange: jdaso.chain(local, jdaso.dasgd(exchange, period=4, delay=1, xi=0.25)),
    )
    return zip(PAPER, makers, strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("cifar10"), help="folder of images")
    parser.add_argument("--epochs", type=int, default=6, help="passes over the images")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each algorithm")
    args = parser.parse_args()
    if not args.data.is_dir():
        print(f"skipped: --data {args.data} does not exist; give a folder with train/ and test/")
        return
    data = study.folder(args.data)
    steps = len(study.batches(len(data.labels), NODES, BATCH_SIZE, args.epochs))
    model = study.SmallCNN(WIDTHS, num_classes=int(data.labels.max()) + 1)
    print(machine())
    print(f"\n{NODES} nodes, {BATCH_SIZE} images per node and step, {steps} steps\n")
    print("| | test accuracy, mean | of each seed | last training loss | in the paper |")
    print("|---|---|---|---|---|")
    for name, make_optimizer in algorithms(steps):
        results = [
            study.train(data, make_optimizer, NODES, BATCH_SIZE, args.epochs, seed, model=model)
            for seed in range(args.seeds)
        ]
        each = [result.accuracy for result in results]
        loss = np.mean([result.losses[-steps // args.epochs :].mean() for result in results])
        print(
            f"| {name} | {np.mean(each):.4f} | {', '.join(f'{x:.4f}' for x in each)} "
            f"| {loss:.4f} | {', '.join(map(str, PAPER[name]))} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
