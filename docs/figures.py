"""Draws the figures of the documentation, in the folder ``figures``.

    python docs/figures.py

Colors are readable on white and on black, and backgrounds are transparent. Measured values come
from bench/README.md, and the arrows between the entries of the package from
tests/test_architecture.py.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "ext"))

import bench_tables  # noqa: E402

INK, COMPUTE, WAIT, FLIGHT, MERGE = "#6b747f", "#4c8fd0", "#d1495b", "#d79a2b", "#3a9d6a"
STYLE = {
    "font.size": 10,
    "svg.fonttype": "none",
    "svg.hashsalt": "jdaso",
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.transparent": True,
}


def figure(width: float, height: float):
    """A figure, and axes without a frame in units of inches."""
    drawn, axes = plt.subplots(figsize=(width, height))
    drawn.subplots_adjust(0, 0, 1, 1)
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return drawn, axes


def box(axes, x, y, width, height, text, color=INK, size=10, fill=0.15):
    """A box with rounded corners and centered text."""
    shape = dict(boxstyle="round,pad=0,rounding_size=0.06", linewidth=1.4)
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, facecolor=(color, fill), edgecolor=color, **shape)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", size=size)


def arrow(axes, start, end, text="", color=INK, bend=0.0, offset=(0.0, 0.1)):
    """An arrow with text beside its middle."""
    style = dict(
        arrowstyle="-|>", mutation_scale=11, color=color, linewidth=1.3, shrinkA=0, shrinkB=0
    )
    axes.add_patch(FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", **style))
    middle = ((start[0] + end[0]) / 2 + offset[0], (start[1] + end[1]) / 2 + offset[1])
    axes.text(*middle, text, ha="center", va="center", size=9)


def parts():
    drawn, axes = figure(8, 2.9)
    top = 1.75
    box(axes, 0.1, top, 2.3, 1.0, "Schedule\nwhen to post,\nhow long it may take", COMPUTE)
    box(axes, 2.85, top, 2.3, 1.0, "Exchange\nhow bytes cross\nbetween nodes", FLIGHT)
    box(axes, 5.6, top, 2.3, 1.0, "Merge\nwhat a late sum does\nto the parameters", MERGE)
    for x, text in ((1.25, "period, delay"), (4.0, "start, finish"), (6.75, "x, sum, age")):
        arrow(axes, (x, top - 0.02), (x, 1.02), text, offset=(0.62, 0))
    box(
        axes,
        0.1,
        0.35,
        7.8,
        0.65,
        "Engine: local update, then one conditional that merges and posts what is due",
    )
    axes.text(4, 0.13, "parameters, state  →  parameters, state", ha="center", va="center", size=9)
    return drawn


def timeline():
    drawn, axes = figure(8, 3.1)
    unit, height = 0.62, 0.42

    def step(x, y, width, number):
        box(axes, x, y, width, height, number, COMPUTE, 9)

    y = 2.35
    axes.text(0.1, y + 0.6, "blocking: period 4, delay 0", va="center", size=10)
    x = 0.1
    for number in range(8):
        step(x, y, unit - 0.06, str(number))
        x += unit
        if number % 4 == 3:
            box(axes, x, y, 1.15, height, "wait", WAIT, 9)
            x += 1.21
    y = 0.95
    axes.text(0.1, y + 0.62, "with a delay: period 4, delay 2", va="center", size=10)
    for number in range(8):
        merges = number in (5,)
        step(0.1 + number * unit, y, unit - 0.06, str(number))
        if merges:
            axes.text(
                0.1 + (number + 1) * unit,
                y + height + 0.1,
                "merge",
                ha="center",
                size=9,
                color=MERGE,
            )
            axes.plot([0.07 + (number + 1) * unit] * 2, [y - 0.52, y + height], color=MERGE, lw=1.6)
    start = 0.07 + 4 * unit
    axes.text(start, y + height + 0.1, "post", ha="center", size=9, color=FLIGHT)
    axes.plot([start] * 2, [y - 0.52, y + height], color=FLIGHT, lw=1.6)
    box(axes, start, y - 0.5, 2 * unit, 0.3, "exchange in flight", FLIGHT, 8.5)
    start = 0.07 + 8 * unit
    box(axes, start, y - 0.5, 2 * unit, 0.3, "the next one", FLIGHT, 8.5)
    for number in (8, 9, 10, 11):
        step(0.1 + number * unit, y, unit - 0.06, str(number))
    axes.annotate("", (7.9, 0.22), (0.1, 0.22), arrowprops=dict(arrowstyle="-|>", color=INK))
    axes.text(7.9, 0.08, "time", ha="right", va="center", size=9)
    axes.text(0.1, 0.08, "boxes with numbers are training steps", va="center", size=9)
    return drawn


def exchange():
    drawn, axes = figure(8, 3.9)
    lanes = (("device", 3.1), ("host memory", 2.2), ("thread", 1.3), ("network", 0.4))
    for name, y in lanes:
        axes.text(0.05, y + 0.22, name, va="center", size=10)
        axes.plot([1.15, 7.95], [y - 0.2] * 2, color=INK, lw=0.5, alpha=0.5)
    y = dict(lanes)
    for x, text in ((1.2, "step t"), (2.55, "t + 1"), (3.9, "t + 2"), (5.25, "t + 3")):
        box(axes, x, y["device"], 1.25, 0.45, text, COMPUTE, 9)
    box(axes, 6.6, y["device"], 1.25, 0.45, "merge", MERGE, 9)
    box(axes, 1.75, y["host memory"], 1.5, 0.45, "buffer, wire dtype", FLIGHT, 9)
    box(axes, 5.15, y["host memory"], 1.4, 0.45, "sum, float32", FLIGHT, 9)
    box(axes, 2.6, y["thread"], 3.1, 0.45, "compare with others, send, add", FLIGHT, 9)
    box(axes, 2.9, y["network"], 2.5, 0.45, "messages between nodes", FLIGHT, 9)
    arrow(axes, (2.35, 3.1), (2.35, 2.66), "post: copy and cast", offset=(-0.72, -0.12))
    arrow(axes, (2.9, 2.2), (2.9, 1.76))
    arrow(axes, (3.7, 1.3), (3.7, 0.86))
    arrow(axes, (4.7, 0.86), (4.7, 1.29))
    arrow(axes, (5.4, 1.76), (5.4, 2.19))
    arrow(axes, (6.2, 2.66), (6.9, 3.09), "finish: wait, copy", offset=(0.62, -0.2))
    axes.text(4.2, 3.72, "training continues while the exchange is in flight", ha="center", size=9)
    return drawn


def architecture():
    source = (HERE.parent / "tests" / "test_architecture.py").read_text()
    node = next(
        n
        for n in ast.parse(source).body
        if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "ENTRIES"
    )
    entries = {
        key.value: {e.value for e in getattr(value, "elts", [])}
        for key, value in zip(node.value.keys, node.value.values, strict=True)
    }
    level = {}
    for name, imported in entries.items():  # from the lowest to the highest
        level[name] = 1 + max((level[other] for other in imported), default=-1)
    rows = defaultdict(list)
    for name in entries:
        rows[level[name]].append(name)
    width, gap = 1.35, 1.02
    drawn, axes = figure(8, gap * (len(rows) + 1) + 0.1)
    place = {}
    for row, names in rows.items():
        space = 8 / len(names)
        for i, name in enumerate(names):
            place[name] = (space * (i + 0.5), 0.3 + gap * row)
    for name, imported in entries.items():
        # An arrow to what it imports, unless another of its imports leads there.
        direct = {o for o in imported if not any(o in entries[p] for p in imported)}
        for other in sorted(direct):  # the same file each time
            (x, y), (x2, y2) = place[name], place[other]
            share = (x2 - x) * 0.12
            arrow(axes, (x + share, y - 0.01), (x2 - share, y2 + 0.44))
    colors = {"core": COMPUTE, "schedules": COMPUTE, "algorithms": COMPUTE}
    for name, (x, y) in place.items():
        box(axes, x - width / 2, y, width, 0.42, name, colors.get(name, FLIGHT), 10)
    top = 0.3 + gap * len(rows)
    box(axes, 0.6, top, 6.8, 0.42, "__init__ and __main__ import all entries", INK)
    axes.text(
        4,
        0.12,
        "blue: does not depend on the network. Arrows lead to imports; implied ones are left out",
        ha="center",
        va="center",
        size=9,
    )
    return drawn


def step_time():
    drawn, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    measured = bench_tables.rows("Step times, predicted and measured")
    rates = {"mbit": 1, "gbit": 1000}
    colors = {"synchronous": WAIT, "local_sgd": FLIGHT, "dasgd": COMPUTE, "daso": MERGE}
    for algorithm, color in colors.items():
        points = []
        for row in measured:
            if row["nodes"] == "2" and row["algorithm"] == algorithm:
                rate = row["link"].split(",")[0]
                points.append((float(rate[:-4]) * rates[rate[-4:]], float(row["measured, s"])))
        axes.plot(
            *zip(*sorted(points), strict=True),
            marker="o",
            color=color,
            label=f"jdaso, {algorithm}",
        )
    peers = [
        row
        for row in bench_tables.rows("Speed of jdaso and PyTorch")
        if row[""].startswith("torch")
    ]
    names = {"torch ddp": "s", "torch powersgd": "^", "torch postlocal": "D", "torch none": "_"}
    for row in peers:
        if row[""] in names:
            seconds = float(row["s/step, median"])
            axes.plot(200, seconds, names[row[""]], color=INK, ms=8, ls="", label=row[""])
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="bandwidth between two nodes, Mbit/s",
        ylabel="seconds per step",
    )
    for axis, ticks in ((axes.xaxis, (100, 200, 1000)), (axes.yaxis, (0.2, 0.5, 1, 2))):
        axis.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.grid(alpha=0.3, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn


def peers():
    drawn, panels = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained", sharey=True)
    titles = ("convolutions, 200 Mbit/s, 1 ms", "dense layers, 1 Gbit/s, 0.2 ms")
    for number, (axes, title) in enumerate(zip(panels, titles, strict=True), start=1):
        rows = bench_tables.rows("Speed of jdaso and PyTorch", number)
        names = [row[""] for row in rows]
        seconds = [float(row["s/step, median"]) for row in rows]
        colors = [COMPUTE if name.startswith("jdaso") else FLIGHT for name in names]
        bars = axes.barh(names, seconds, color=colors, height=0.7)
        axes.bar_label(bars, fmt="%.2f", padding=3, color=INK, size=8)
        axes.set_title(title, size=10, color=INK)
        axes.set(xlabel="seconds per step", xlim=(0, 1.12 * max(seconds)))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    return drawn


def period_delay():
    drawn, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    rows = bench_tables.rows("Accuracy of DASO by period and delay, 32 nodes")
    periods = sorted({int(row["B"]) for row in rows})
    delays = sorted({int(row["S"]) for row in rows})
    colors = plt.get_cmap("RdYlGn")
    opacity = 0.6  # on white, so that black text is readable in both themes
    for row in rows:
        x, y = periods.index(int(row["B"])), delays.index(int(row["S"]))
        value = float(row["accuracy, %"])
        share = max(0.0, (value - 85) / 15)
        axes.add_patch(
            plt.Rectangle(
                (x - 0.48, y - 0.46),
                0.96,
                0.92,
                color=[1 - opacity * (1 - c) for c in colors(share)[:3]],
            )
        )
        axes.text(x, y, f"{value:.1f}", ha="center", va="center", size=9, color="black")
    axes.set(xlim=(-0.5, len(periods) - 0.5), ylim=(-0.5, len(delays) - 0.5))
    axes.set_xticks(range(len(periods)), periods)
    axes.set_yticks(range(len(delays)), delays)
    axes.set(xlabel="period B, steps", ylabel="delay S, steps")
    axes.spines[:].set_visible(False)
    return drawn


def main() -> None:
    plt.rcParams.update(STYLE)
    (HERE / "figures").mkdir(exist_ok=True)
    for draw in (parts, timeline, exchange, architecture, step_time, peers, period_delay):
        path = HERE / "figures" / f"{draw.__name__}.svg"
        draw().savefig(path, metadata={"Date": None, "Creator": None})
        text = "\n".join(line.rstrip() for line in path.read_text().splitlines())
        path.write_text(text + "\n")


if __name__ == "__main__":
    main()
