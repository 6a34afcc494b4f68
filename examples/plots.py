"""Draws a run: loss and test accuracy, phases, period and delay over steps.

python examples/plots.py runs/demo
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # a compute node has no display
import matplotlib.pyplot as plt

COLOURS = {"warm-up": "tab:orange", "cycling": "tab:green", "cool-down": "tab:blue"}


def plot(out: Path) -> Path:
    """Reads metrics.jsonl in a folder and writes plot.png beside it."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    if not lines:
        raise ValueError(f"out: {out / 'metrics.jsonl'} is empty, there is nothing to plot.")
    steps = [line["step"] for line in lines]
    starts = [0, *steps[:-1]]

    figure, (loss, accuracy, plan) = plt.subplots(
        3, 1, sharex=True, figsize=(7, 6), height_ratios=(3, 3, 2), layout="constrained"
    )
    loss.semilogy(steps, [line["loss"] for line in lines], "k.-")
    loss.set_ylabel("training loss")
    accuracy.plot(steps, [line["test_accuracy"] for line in lines], "k.-")
    accuracy.set_ylabel("test accuracy")
    for name, style in (("period", "-"), ("delay", "--")):
        plan.stairs([line[name] for line in lines], [0, *steps], label=name, color="k", ls=style)
    plan.set_ylabel("steps")
    plan.set_xlabel("optimizer step")
    plan.legend(loc="lower center", ncols=2)

    # One band per phase: its epochs are consecutive lines.
    spans = zip(starts, steps, (line["phase"] for line in lines), strict=True)
    for phase, group in itertools.groupby(spans, key=lambda span: span[2]):
        first, *_, last = [*group] * 2
        for axis in (loss, accuracy, plan):
            axis.axvspan(first[0], last[1], color=COLOURS[phase], alpha=0.12, lw=0)
        loss.text(
            (first[0] + last[1]) / 2, 1.02, phase, ha="center", transform=loss.get_xaxis_transform()
        )
    loss.set_xlim(0, steps[-1])
    path = out / "plot.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    print(plot(Path(sys.argv[1])))
