"""Trains one small network with every algorithm on a virtual cluster, and compares the results.

python examples/papers/compare.py --nodes 8 --epochs 24
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optax
import study

from jdaso import (
    allreduce_gradients,
    chain,
    dasgd,
    daso,
    diloco,
    eamsgd,
    easgd,
    easgd_center,
    local_sgd,
    schedules,
    single_exchange,
)
from jdaso.core.command_line import path_option, text_table
from jdaso.core.exchange import Exchange
from jdaso.core.types import PyTree

OUTER_WARMUP = 10
HEAD = ("", "final loss", "accuracy", "exchanges", "waits", "bytes/step", "of sync")
NOTES = """\
final loss: the training loss, averaged over the last epoch.
accuracy: on the test images, with the mean of all nodes' parameters; with the center for easgd \
and eamsgd, with one node's parameters for none.
waits: exchanges for which training waits.
bytes/step: bytes that one node sends, averaged over all steps.
One test image is {image:.4f} of the accuracy. Smaller differences mean nothing."""
SETTINGS = """\
{nodes} nodes, {batch_size} images per node and step, {steps} steps.
All use SGD with momentum {momentum} and a learning rate that rises to {learning_rate} in the \
first tenth of the steps and then falls as a cosine.
EAMSGD uses Nesterov's momentum. DiLoCo has an outer optimizer, SGD 0.7 with Nesterov momentum \
0.9, and is made for 100 rounds or more. Here it begins with a warm-up of {warmup} rounds of plain \
averaging, which the papers do not have. Streaming DiLoCo exchanges two fragments with mix 0.5. In \
the cycling schedule of DASO the first and the last epochs block.
"""


class Candidate(NamedTuple):
    """An optimizer to compare.

    Attributes:
        make_optimizer: ``exchange -> transformation``.
        evaluated: ``(opt_state, params) -> params``, the parameters to test. None stands for the
            mean of the parameters over all nodes.
    """

    make_optimizer: Callable[[Exchange], optax.GradientTransformation]
    evaluated: Callable[[PyTree, PyTree], PyTree] | None = None


def candidates(args: argparse.Namespace, epoch_steps: int) -> dict[str, Candidate]:
    """Every algorithm with the same local optimizer."""
    total, period, delay = args.epochs * epoch_steps, args.period, args.delay
    blocking, fragments = blocking_epochs(args.epochs) * epoch_steps, min(2, period)
    learning_rate = optax.warmup_cosine_decay_schedule(0, args.learning_rate, total // 10, total)
    sgd = optax.sgd(learning_rate, args.momentum)
    cycling = schedules.cycling(period, blocking, blocking, total, epoch_steps, delay)
    constant = schedules.constant(period, delay)
    both = f"period {period}, delay {delay}"
    streaming = {"delay": delay, "mix": 0.5, "fragments": fragments}

    def center(opt_state, params):
        del params
        return easgd_center(opt_state)

    return {
        "sync, float32": Candidate(lambda x: chain(sgd, allreduce_gradients(x, "float32"))),
        "sync, bfloat16": Candidate(lambda x: chain(sgd, allreduce_gradients(x, "bfloat16"))),
        f"local_sgd, period {period}": Candidate(lambda x: chain(sgd, local_sgd(x, period))),
        f"dasgd, {both}": Candidate(lambda x: chain(sgd, dasgd(x, period, delay))),
        f"easgd, period {period}": Candidate(lambda x: chain(sgd, easgd(x, period)), center),
        f"eamsgd, period {period}": Candidate(
            lambda x: eamsgd(x, period, learning_rate, args.momentum), center
        ),
        f"diloco, period {period}": Candidate(
            lambda x: chain(sgd, diloco(x, period, warmup=OUTER_WARMUP))
        ),
        f"diloco, {both}, streaming": Candidate(
            lambda x: chain(sgd, diloco(x, period, warmup=OUTER_WARMUP, **streaming))
        ),
        f"daso, cycling {both}": Candidate(lambda x: chain(sgd, daso(x, schedule=cycling))),
        f"daso, {both}": Candidate(lambda x: chain(sgd, daso(x, schedule=constant))),
        "none": Candidate(
            lambda x: chain(sgd, local_sgd(single_exchange(), total + 1)),
            lambda opt_state, params: params,
        ),
    }


def blocking_epochs(epochs: int) -> int:
    """Epochs of each of the two blocking phases of DASO's cycling schedule.

    >>> blocking_epochs(24), blocking_epochs(2)
    (3, 1)
    """
    return max(1, epochs // 8)


def compare(args: argparse.Namespace) -> None:
    """Trains with every algorithm, prints a table and writes a plot."""
    data = study.digits() if args.data == "digits" else study.folder(args.data)
    epoch_steps = len(study.batches(len(data.labels), args.nodes, args.batch_size, epochs=1))
    print(SETTINGS.format(steps=args.epochs * epoch_steps, warmup=OUTER_WARMUP, **vars(args)))
    results = {
        name: study.train(
            data,
            candidate.make_optimizer,
            args.nodes,
            args.batch_size,
            args.epochs,
            args.seed,
            candidate.evaluated,
        )
        for name, candidate in candidates(args, epoch_steps).items()
    }
    print(table(results, epoch_steps))
    print(f"\n{NOTES.format(image=1 / len(data.test_labels))}")
    if 2 * blocking_epochs(args.epochs) >= args.epochs:
        print(
            f"With --epochs {args.epochs}, DASO's cycling schedule has blocking phases only: "
            "choose at least 3."
        )
    try:
        print(f"\n{plot(results, epoch_steps, args.out)}")
    except ImportError:
        print("\nNo plot was drawn: it needs matplotlib (pip install matplotlib).")


def table(results: dict[str, study.Result], epoch_steps: int) -> str:
    """A table with one row for each algorithm. The first one is the reference for bytes."""
    rows: list[tuple[str, ...]] = [HEAD]
    reference = max(next(iter(results.values())).bytes_sent[-1], 1)
    for name, result in results.items():
        sent = result.bytes_sent[-1]
        rows.append(
            (
                name,
                f"{result.losses[-epoch_steps:].mean():.4f}",
                f"{result.accuracy:.4f}",
                f"{result.exchanges}",
                f"{result.waits}",
                f"{sent / len(result.losses):.0f}",
                f"{sent / reference:.3f}",
            )
        )
    return text_table(rows)


def plot(results: dict[str, study.Result], epoch_steps: int, out: Path) -> Path:
    """Draws the loss of each epoch over steps and over bytes; writes plot.png to a folder."""
    import matplotlib

    matplotlib.use("agg")  # compute nodes have no display
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(
        1, 2, sharey=True, figsize=(11, 5), layout="constrained"
    )
    for index, (name, result) in enumerate(results.items()):
        losses = result.losses.reshape(-1, epoch_steps).mean(axis=1)
        style = {"ls": ("-", "--")[index // 10 % 2], "marker": ".", "label": name}
        by_step.semilogy(np.arange(1, len(losses) + 1) * epoch_steps, losses, **style)
        sent = result.bytes_sent[epoch_steps - 1 :: epoch_steps]
        if sent.any():
            by_bytes.loglog(sent, losses, **style)
        else:
            by_bytes.plot([], [])  # so that both plots use the same colours
    by_step.set(xlabel="optimizer step", ylabel="training loss, mean of an epoch")
    by_bytes.set(xlabel="bytes sent by a node")
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside right center")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plot.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train one small network with every algorithm on a virtual cluster.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", default="digits", help="digits, or a folder with train/ and val/ or test/")
    add("--nodes", type=int, default=8, help="number of virtual nodes")
    add("--epochs", type=int, default=24, help="passes over the images")
    add("--batch-size", type=int, default=16, help="images per node and step")
    add("--learning-rate", type=float, default=0.05, help="peak of the learning rate")
    add("--momentum", type=float, default=0.9, help="momentum of SGD")
    add("--period", type=int, default=4, help="steps between two exchanges")
    add("--delay", type=int, default=1, help="steps between posting an exchange and merging it")
    add("--seed", type=int, default=0, help="seed of parameters and batches")
    add("--out", type=path_option, default=Path("runs/compare"), help="folder to write plot.png to")
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
