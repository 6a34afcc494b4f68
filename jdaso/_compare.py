"""``python -m jdaso compare``: one small network, trained with every algorithm."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optax

from jdaso import schedules, study
from jdaso._base import Exchange, PyTree
from jdaso._memory import chain
from jdaso.algorithms._allreduce_gradients import allreduce_gradients
from jdaso.algorithms._dasgd import dasgd
from jdaso.algorithms._daso import daso
from jdaso.algorithms._diloco import diloco
from jdaso.algorithms._eamsgd import eamsgd
from jdaso.algorithms._easgd import easgd, easgd_center
from jdaso.algorithms._local_sgd import local_sgd
from jdaso.exchange._axis import single_exchange

HEAD = ("", "final loss", "accuracy", "exchanges", "waits", "bytes/step", "of sync")
NOTES = """\
final loss: of training, the mean over the last epoch. accuracy: of the mean of all nodes' \
parameters on the test images; of the centre for easgd and eamsgd, of one node for none. waits: \
exchanges that training waits for. bytes/step: what a node sends, averaged over all steps. One \
test image is {image:.4f}; smaller differences of accuracy say nothing."""


class Contestant(NamedTuple):
    """An optimizer, and what of a node is evaluated; None is the mean of the parameters."""

    make_optimizer: Callable[[Exchange], optax.GradientTransformation]
    evaluated: Callable[[PyTree, PyTree], PyTree] | None = None


def contestants(args: argparse.Namespace, epoch: int) -> dict[str, Contestant]:
    """Every algorithm with the same local optimizer; ``epoch`` is its number of steps."""
    total, period, delay = args.epochs * epoch, args.period, args.delay
    blocking, fragments = max(1, args.epochs // 8) * epoch, min(2, period)
    learning_rate = optax.warmup_cosine_decay_schedule(0, args.learning_rate, total // 10, total)
    sgd = optax.sgd(learning_rate, args.momentum)
    cycling = schedules.cycling(period, blocking, blocking, total, epoch, delay)
    constant = schedules.constant(period, delay)
    flying = f"period {period}, delay {delay}"

    def center(opt_state, params):
        del params
        return easgd_center(opt_state)

    return {
        "sync, float32": Contestant(lambda x: optax.chain(allreduce_gradients(x, "float32"), sgd)),
        "sync, bfloat16": Contestant(
            lambda x: optax.chain(allreduce_gradients(x, "bfloat16"), sgd)
        ),
        f"local_sgd, period {period}": Contestant(lambda x: chain(sgd, local_sgd(x, period))),
        f"dasgd, {flying}": Contestant(lambda x: chain(sgd, dasgd(x, period, delay))),
        f"easgd, period {period}": Contestant(lambda x: chain(sgd, easgd(x, period)), center),
        f"eamsgd, period {period}": Contestant(
            lambda x: eamsgd(x, period, learning_rate, args.momentum), center
        ),
        f"diloco, period {period}": Contestant(lambda x: chain(sgd, diloco(x, period))),
        f"diloco, {flying}, streaming": Contestant(
            lambda x: chain(sgd, diloco(x, period, delay=delay, mix=0.5, fragments=fragments))
        ),
        f"daso, cycling {flying}": Contestant(lambda x: chain(sgd, daso(x, cycling))),
        f"daso, {flying}": Contestant(lambda x: chain(sgd, daso(x, constant))),
        "none": Contestant(
            lambda x: chain(sgd, local_sgd(single_exchange(), total + 1)),
            lambda opt_state, params: params,
        ),
    }


def compare(args: argparse.Namespace) -> None:
    """Trains with every algorithm; prints a table and writes a plot."""
    data = study.digits() if args.data == "digits" else study.folder(args.data)
    epoch = len(study.batches(len(data.labels), args.nodes, args.batch_size, epochs=1))
    print(
        f"{args.nodes} nodes, {args.batch_size} images per node and step, "
        f"{args.epochs * epoch} steps. For all: SGD, learning rate {args.learning_rate} (rises for "
        f"a tenth of the steps, falls as a cosine), momentum {args.momentum}. EAMSGD's momentum "
        "is Nesterov's; DiLoCo has an outer optimizer, SGD 0.7 with Nesterov momentum 0.9, and "
        "streams two fragments with mix 0.5; DASO cycles between blocking first and last epochs.\n"
    )
    rows: list[tuple[str, ...]] = [HEAD]
    results: dict[str, study.Result] = {}
    for name, contestant in contestants(args, epoch).items():
        results[name] = result = study.train(
            data,
            contestant.make_optimizer,
            args.nodes,
            args.batch_size,
            args.epochs,
            args.seed,
            contestant.evaluated,
        )
        first = next(iter(results.values()))
        share = result.bytes_sent[-1] / max(first.bytes_sent[-1], 1)
        rows.append(
            (
                name,
                f"{result.losses[-epoch:].mean():.4f}",
                f"{result.accuracy:.4f}",
                f"{result.exchanges}",
                f"{result.waits}",
                f"{result.bytes_sent[-1] / len(result.losses):.0f}",
                f"{share:.3f}",
            )
        )
    print(table(rows))
    print(f"\n{NOTES.format(image=1 / len(data.test_labels))}")
    try:
        print(f"\n{plot(results, epoch, args.out)}")
    except ImportError:
        print("\nNo plot without matplotlib: pip install matplotlib")


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows as text, the first column on the left, the others on the right.

    >>> print(table([("", "loss"), ("sgd", "0.1")]))
         loss
    sgd   0.1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def plot(results: dict[str, study.Result], epoch: int, out: Path) -> Path:
    """Loss of every epoch over steps, and over bytes, as plot.png in a folder."""
    import matplotlib

    matplotlib.use("agg")  # a compute node has no display
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(
        1, 2, sharey=True, figsize=(11, 5), layout="constrained"
    )
    for index, (name, result) in enumerate(results.items()):
        losses = result.losses.reshape(-1, epoch).mean(axis=1)
        style = {"ls": ("-", "--")[index // 10 % 2], "marker": ".", "label": name}
        by_step.semilogy(np.arange(1, len(losses) + 1) * epoch, losses, **style)
        sent = result.bytes_sent[epoch - 1 :: epoch]
        if sent.any():
            by_bytes.loglog(sent, losses, **style)
        else:
            by_bytes.plot([], [])  # takes its colour all the same
    by_step.set(xlabel="optimizer step", ylabel="training loss, mean of an epoch")
    by_bytes.set(xlabel="bytes sent by a node")
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside right center")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plot.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
