"""Studies how period and delay change the accuracy of DASO, with 32 nodes on one device.

    python examples/papers/virtual_cluster.py --out runs/virtual_cluster [--phases]

Repeats the rows of Table 2 of the DASO paper (Coquelin et al. 2022). The paper trains ResNet-50 on
ImageNet with 32 nodes, this study trains a small network on digits. Period and delay are constant
during a training. With --phases, every exchange of the first and of the last twentieth of the steps
is blocking, and period and delay are halved when the loss reaches a plateau, as DASO does. The
study takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import study
from jax import lax

import jdaso
from jdaso.core.command_line import path_option

matplotlib.use("agg")
import matplotlib.pyplot as plt

NODES = 32
MODEL = study.SmallCNN()
MOMENTUM = 0.9
FAILED = 50  # accuracy in % below which a training counts as failed; chance is 10
# Top-1 accuracy in % of each (B, S), with 128 GPUs on 32 nodes (daso-journal Table 2).
PAPER = {
    **{(1, 0): 76.5416, (1, 1): 74.9233},
    **{(2, 0): 76.3027, (2, 1): 74.8936, (2, 2): 75.0854},
    **{(4, 0): 74.3478, (4, 1): 73.2962, (4, 2): 71.9570, (4, 4): 73.8560},
    **{(8, 0): 69.2732, (8, 4): 65.4733, (8, 8): 69.6655},
    **{(16, 0): 58.5397, (16, 4): 56.8865, (16, 8): 54.5323, (16, 16): 62.3692},
    **{(32, 0): 43.6855, (32, 4): 44.0639, (32, 16): 41.2458, (32, 32): 50.9539},
}
PERIODS = (1, 2, 4, 8, 16, 32)
# Each claim says that the second (B, S) of every pair has a higher accuracy than the first.
CLAIMS = {
    "Blocking means (S = 0) have a lower accuracy than B = 1": [
        ((b, 0), (1, 0)) for b in PERIODS[1:]
    ],
    "Delayed means (S = B/2) have a lower accuracy than S = 0": [
        ((b, b // 2), (b, 0)) for b in PERIODS[1:]
    ],
    "A delay of one period (S = B) has a higher accuracy than S = B/2": [
        ((b, b // 2), (b, b)) for b in PERIODS[1:]
    ],
    "A delay of one period (S = B) has a higher accuracy than S = 0": [
        ((b, 0), (b, b)) for b in PERIODS[1:]
    ],
}
RULES = {"S = 0": lambda b: 0, "S = B/2": lambda b: b // 2, "S = B": lambda b: b}

Rows = dict[tuple[int, int], np.ndarray]


def fixed(period: jax.Array, delay: jax.Array) -> jdaso.Schedule:
    """:func:`jdaso.constant` for traced numbers, so that one compiled program serves all rows."""

    def plan(state, step):
        no = jnp.bool_(False)
        plan = jdaso.core.Plan(1, period, delay, step + 1, flush=no, blocking=no, epoch_end=no)
        return plan, state

    return jdaso.Schedule(lambda: (), plan, lambda state, loss: state, max(PERIODS))


def phases(period: int, delay: int, steps: int) -> jdaso.Schedule:
    """DASO's three phases. The loss of a tenth of the steps is tested for a plateau."""
    return jdaso.cycling(period, steps // 20, steps // 20, steps, steps // 10, delay)


@functools.partial(jax.jit, static_argnames=("learning_rate", "schedule"))
def train(period, delay, params, images, labels, order, learning_rate, schedule=None):
    """Returns the mean of all nodes' parameters after the training, and the loss of every step.

    Without a ``schedule``, period and delay are constant.
    """
    exchange = jdaso.axis_exchange("node", NODES)
    averaging = jdaso.daso(exchange, schedule=schedule or fixed(period, delay))
    decay = optax.cosine_decay_schedule(learning_rate, decay_steps=len(order))
    tx = jdaso.chain(optax.sgd(decay, MOMENTUM), averaging)

    def step(carry, indices):  # the training step of one node
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, images[indices], labels[indices])
        return jdaso.apply_gradients(tx, grads, opt_state, params, value=loss), loss

    def node(order):
        (last, opt_state), losses = lax.scan(step, (params, tx.init(params)), order)
        last, _ = jdaso.drain(tx, opt_state, last)
        return jdaso.consensus(exchange, last), losses

    params, losses = jax.vmap(node, in_axes=1, axis_name="node")(order)
    return jax.tree.map(lambda x: x[0], params), losses.mean(axis=0)


def loss_fn(params, images, labels):
    logits = MODEL.apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def sweep(args: argparse.Namespace) -> Rows:
    """Trains for each row of the table, prints the rows, and returns the accuracies in %."""
    data = study.digits()
    images, labels = jnp.asarray(data.images), jnp.asarray(data.labels)
    seeds = [
        (
            MODEL.init(jax.random.key(seed), images[:1]),
            study.batches(len(labels), NODES, args.batch_size, args.epochs, seed),
        )
        for seed in range(args.seeds)
    ]
    if len(seeds[0][1]) < 2 * max(PERIODS):
        raise SystemExit(
            f"--epochs {args.epochs}: {len(seeds[0][1])} steps are too few for a period of "
            f"{max(PERIODS)}; give at least {2 * max(PERIODS)} steps."
        )
    print(
        f"{NODES} nodes, {args.batch_size} images per node and step, {len(seeds[0][1])} steps, "
        f"learning rate {args.learning_rate}, momentum {MOMENTUM}, {args.seeds} seeds\n"
    )
    print(
        "| B | S | accuracy, % | standard error | last loss | paper, % |\n|---|---|---|---|---|---|"
    )
    rows = {}
    for (period, delay), paper in PAPER.items():
        accuracies, last = [], []
        schedule = phases(period, delay, len(seeds[0][1])) if args.phases else None
        for start, order in seeds:
            batches = (start, images, labels, order)
            params, losses = train(period, delay, *batches, args.learning_rate, schedule)
            accuracies.append(
                100 * study.accuracy(MODEL, params, data.test_images, data.test_labels)
            )
            last.append(float(losses[-10:].mean()))
        rows[period, delay] = each = np.array(accuracies)
        print(
            f"| {period} | {delay} | {each.mean():.2f} | {standard_error(each):.2f} "
            f"| {np.mean(last):.4f} | {paper:.2f} |",
            flush=True,
        )
    return rows


def standard_error(each: np.ndarray) -> float:
    """The standard error of the mean, NaN for a single seed."""
    return float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else float("nan")


def findings(rows: Rows) -> str:
    """Compares the results with the findings of the paper.

    The accuracies of two rows are compared seed by seed, because a seed has the same initial
    parameters and the same batches in all rows. A difference is clear if its mean over the seeds
    exceeds two standard errors.
    """
    lines = []
    for claim, pairs in CLAIMS.items():
        paper = sum(PAPER[low] < PAPER[high] for low, high in pairs)
        gains = [rows[high] - rows[low] for low, high in pairs]
        clear = [gain.mean() / max(standard_error(gain), 1e-9) for gain in gains]
        yes, opposite = sum(x > 2 for x in clear), sum(x < -2 for x in clear)
        verdict = "reproduced" if yes > len(pairs) / 2 else "not reproduced"
        if opposite > len(pairs) / 2:
            verdict = "the opposite was found"
        lines.append(
            f"- {claim}. Paper: {paper} of {len(pairs)} periods. Here: {yes}, the opposite in "
            f"{opposite}, no clear difference in {len(pairs) - yes - opposite}. Result: {verdict}."
        )
    failed = [row for row, each in rows.items() if each.mean() < FAILED]
    if failed:
        lines.append(
            f"- The mean accuracy is below {FAILED} % for (B, S) = {', '.join(map(str, failed))}. "
            "Training with some or all seeds has failed at this learning rate."
        )
    return "\n".join(lines)


def plot(rows: Rows, out: Path) -> Path:
    """Draws accuracy over period for each rule of the delay, beside the results of the paper."""
    figure, axes = plt.subplots(1, 2, sharex=True, figsize=(9, 4), layout="constrained")
    for name, rule in RULES.items():
        pairs = [(b, rule(b)) for b in PERIODS if b > 1 or name != "S = B/2"]
        periods = [b for b, _ in pairs]
        means = [rows[pair].mean() for pair in pairs]
        axes[0].errorbar(
            periods, means, [standard_error(rows[p]) for p in pairs], marker="o", label=name
        )
        axes[1].plot(periods, [PAPER[pair] for pair in pairs], marker="o", label=name)
    for axis, title in zip(
        axes, ("digits, 32 virtual nodes", "paper: ImageNet, 32 nodes of 4 GPUs"), strict=True
    ):
        axis.set(title=title, xlabel="period B, steps", ylabel="test accuracy, %")
        axis.set_xscale("log", base=2)
        axis.legend()
    out.mkdir(parents=True, exist_ok=True)
    path = out / "plot.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=40, help="passes over the images")
    add("--batch-size", type=int, default=4, help="images per node and step")
    add(
        "--learning-rate", type=float, default=0.15, help="initial learning rate; falls as a cosine"
    )
    add("--seeds", type=int, default=4, help="trainings of each row")
    add("--phases", action="store_true", help="warm-up, cycling and cool-down, as in DASO")
    add(
        "--out",
        type=path_option,
        default=Path("runs/virtual_cluster"),
        help="folder to write plot.png to",
    )
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error(f"--seeds must be at least 2 to estimate a standard error, got {args.seeds}.")
    rows = sweep(args)
    print(f"\n{findings(rows)}\n\n{plot(rows, args.out)}")


if __name__ == "__main__":
    main()
