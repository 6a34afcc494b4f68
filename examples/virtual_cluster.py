"""A study of 32 nodes on one device: what period and delay do to the accuracy of DASO.

    python examples/virtual_cluster.py --out runs/virtual_cluster

Repeats the rows of Table 2 of the DASO paper (Coquelin et al. 2022), there ResNet-50 on ImageNet
with 32 nodes, here a small network on digits. As there, period and delay stay as they are for the
whole training, so the schedule is not the cycling one. Takes some minutes on two cores.
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
from jax import lax

import jdaso
from jdaso import study

matplotlib.use("agg")
import matplotlib.pyplot as plt

NODES = 32
MODEL = study.SmallCNN()
MOMENTUM = 0.9
FAILED = 50  # %; chance is 10
# (B, S): top-1 accuracy in %, 128 GPUs on 32 nodes (daso-journal Table 2).
PAPER = {
    **{(1, 0): 76.5416, (1, 1): 74.9233},
    **{(2, 0): 76.3027, (2, 1): 74.8936, (2, 2): 75.0854},
    **{(4, 0): 74.3478, (4, 1): 73.2962, (4, 2): 71.9570, (4, 4): 73.8560},
    **{(8, 0): 69.2732, (8, 4): 65.4733, (8, 8): 69.6655},
    **{(16, 0): 58.5397, (16, 4): 56.8865, (16, 8): 54.5323, (16, 16): 62.3692},
    **{(32, 0): 43.6855, (32, 4): 44.0639, (32, 16): 41.2458, (32, 32): 50.9539},
}
PERIODS = (1, 2, 4, 8, 16, 32)
RULES = {"S = 0": lambda b: 0, "S = B/2": lambda b: b // 2, "S = B": lambda b: b}

Rows = dict[tuple[int, int], np.ndarray]


def fixed(period: jax.Array, delay: jax.Array) -> jdaso.Schedule:
    """:func:`jdaso.constant` of numbers that jit does not know: one program for all rows."""

    def plan(state, step):
        no = jnp.bool_(False)
        return jdaso.Plan(1, period, delay, step + 1, flush=no, blocking=no, epoch_end=no), state

    return jdaso.Schedule(lambda: (), plan, lambda state, loss: state, max(PERIODS), True)


@functools.partial(jax.jit, static_argnames="learning_rate")
def train(period, delay, params, images, labels, order, learning_rate):
    """The mean of all nodes' parameters after the training, and the loss of every step."""
    exchange = jdaso.axis_exchange("node", NODES)
    averaging = jdaso.daso(exchange, fixed(period, delay))
    decay = optax.cosine_decay_schedule(learning_rate, decay_steps=len(order))
    tx = optax.chain(optax.sgd(decay, MOMENTUM), averaging)

    def step(carry, places):  # what every node does, as if it were alone
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, images[places], labels[places])
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return (optax.apply_updates(params, updates), opt_state), loss

    def node(order):
        (last, opt_state), losses = lax.scan(step, (params, tx.init(params)), order)
        last, _ = jdaso.drain(averaging, opt_state, last)
        return jdaso.consensus(exchange, last), losses

    params, losses = jax.vmap(node, in_axes=1, axis_name="node")(order)
    return jax.tree.map(lambda x: x[0], params), losses.mean(axis=0)


def loss_fn(params, images, labels):
    logits = MODEL.apply(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def sweep(args: argparse.Namespace) -> Rows:
    """Accuracies in % of all seeds for every row; prints them."""
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
            f"--epochs: {len(seeds[0][1])} steps are too few for a period of {max(PERIODS)}."
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
        for start, order in seeds:
            params, losses = train(period, delay, start, images, labels, order, args.learning_rate)
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
    """That of the mean; nan for a single seed."""
    return float(each.std(ddof=1) / np.sqrt(len(each))) if len(each) > 1 else float("nan")


def findings(rows: Rows) -> str:
    """What the paper found, and in how many rows it is so here; differences of seeds' means.

    A difference counts if it exceeds two standard errors, taken over the seeds, which have the
    same first parameters and the same batches in all rows.
    """
    claims = {
        "blocking means (S = 0): accuracy below that of B = 1": [
            ((b, 0), (1, 0)) for b in PERIODS[1:]
        ],
        "late means (S = B/2): accuracy below that of S = 0": [
            ((b, b // 2), (b, 0)) for b in PERIODS[1:]
        ],
        "delay = period (S = B): accuracy above that of S = B/2": [
            ((b, b // 2), (b, b)) for b in PERIODS[1:]
        ],
        "delay = period (S = B): accuracy above that of S = 0": [
            ((b, 0), (b, b)) for b in PERIODS[1:]
        ],
    }
    lines = []
    for claim, pairs in claims.items():
        paper = sum(PAPER[low] < PAPER[high] for low, high in pairs)
        gains = [rows[high] - rows[low] for low, high in pairs]
        sure = [gain.mean() / max(standard_error(gain), 1e-9) for gain in gains]
        yes, opposite = sum(x > 2 for x in sure), sum(x < -2 for x in sure)
        verdict = "reproduced" if yes > len(pairs) / 2 else "not reproduced"
        if opposite > len(pairs) / 2:
            verdict = "the opposite was found"
        lines.append(
            f"- {claim}: paper {paper} of {len(pairs)} periods; here {yes}, the opposite in "
            f"{opposite}, no clear difference in {len(pairs) - yes - opposite}: {verdict}"
        )
    failed = [row for row, each in rows.items() if each.mean() < FAILED]
    if failed:
        lines.append(
            f"- (B, S) with a mean below {FAILED} %: {', '.join(map(str, failed))}: training of "
            "some seeds, or all, has failed at this learning rate"
        )
    return "\n".join(lines)


def plot(rows: Rows, out: Path) -> Path:
    """Accuracy over period, a line for each rule of the delay, with the paper's beside it."""
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
    add("--epochs", type=int, default=40)
    add("--batch-size", type=int, default=4, help="images per node and step")
    add("--learning-rate", type=float, default=0.15, help="the first one, falls as a cosine")
    add("--seeds", type=int, default=4)
    add("--out", type=Path, default=Path("runs/virtual_cluster"), help="folder for plot.png")
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds must be at least 2: without a standard error nothing is compared.")
    rows = sweep(args)
    print(f"\n{findings(rows)}\n\n{plot(rows, args.out)}")


if __name__ == "__main__":
    main()
