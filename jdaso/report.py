"""Curves and a table of trainings, from the metrics.jsonl that each has written.

    python -m jdaso report runs/daso               # draws runs/daso/report.png
    python -m jdaso report runs/daso runs/dasgd    # draws both together, in report.png here

What is there is drawn: ``loss``, all keys that begin with ``test_``, ``learning_rate``, ``phase``,
``period``, ``delay``, ``images_per_second``, ``drift``, and the totals ``bytes_sent``,
``seconds_blocked`` and ``seconds_in_flight``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jdaso._compare import table
from jdaso._runs import Run, names, read
from jdaso._runs import read_lines as read_lines
from jdaso.schedules import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDS = dict(zip(PHASES, ("tab:orange", "tab:green", "tab:blue"), strict=True))
OPACITY = 0.12
STYLES = ("-", "--")
CLOCKS = {"h": 3600.0, "min": 60.0, "s": 1.0}
WIDTH, HEIGHT = 5.5, 2.3  # inches of a panel, two of which are side by side
LOWER_IS_BETTER = ("loss", "error", "perplexity")


class Panel(NamedTuple):
    """A set of axes.

    Attributes:
        label: of the vertical axis.
        x: the column of the horizontal one.
        curves: columns, and what a legend calls each; one or two.
        stairs: whether a number is that of a whole epoch.
        log: whether the vertical axis is logarithmic, where all numbers are positive.
        with_zero: whether the vertical axis begins at 0.
    """

    label: str
    x: str
    curves: dict[str, str]
    stairs: bool = False
    log: bool = False
    with_zero: bool = True

    def values(self, runs: Sequence[Run]) -> np.ndarray:
        """All finite numbers in it."""
        found = [run.columns[key] for run in runs for key in self.curves if key in run.columns]
        joined = np.concatenate([np.empty(0), *found])
        return joined[np.isfinite(joined)]


def report(runs: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Draws one run, or several together.

    Args:
        runs: folders with a metrics.jsonl in each.
        out: the picture to write, in any format of matplotlib's; by default report.png, in the
            folder of the run, or in the current one if there are several.

    Returns:
        The path of the picture.

    Raises:
        ValueError: if there is nothing to draw; the message names the file.
        ImportError: without matplotlib.
    """
    return draw(read_all(runs), out)


def read_all(runs: Sequence[Path | str]) -> list[Run]:
    """The runs, each once.

    Raises:
        ValueError: for no run, or one that cannot be read.
    """
    if not runs:
        raise ValueError("runs is empty; name at least one folder with a metrics.jsonl.")
    return [read(run) for run in dict.fromkeys(Path(run).resolve() for run in runs)]


def keys_of_tests(runs: Sequence[Run]) -> list[str]:
    """The columns that come from tests, in the order of their appearance."""
    return list(dict.fromkeys(k for run in runs for k in run.columns if k.startswith("test_")))


def panels(runs: Sequence[Run]) -> list[Panel]:
    """What there is to draw; panels without numbers are left out.

    Raises:
        ValueError: if that is nothing.
    """
    learnt = [("training loss", "loss"), *((_words(key), key) for key in keys_of_tests(runs))]
    wanted = [
        Panel(label, x, {key: ""}, log=key == "loss", with_zero=False)
        for label, key in learnt
        for x in ("step", "seconds")
    ]
    times = {"epoch_blocked": "blocked by exchanges", "epoch_hidden": "hidden"}
    wanted += [
        Panel("steps", "step", {"period": "period", "delay": "delay"}, stairs=True),
        Panel("learning rate", "step", {"learning_rate": ""}),
        Panel("images/s", "step", {"images_per_second": ""}),
        Panel("replica drift ‖x - mean‖", "step", {"drift": ""}),
        Panel("sent, MB", "step", {"megabytes_sent": ""}),
        Panel("seconds per epoch", "step", times, stairs=True),
    ]
    found = [panel for panel in wanted if len(panel.values(runs))]
    if not found:
        raise ValueError(
            f"runs: {', '.join(str(run.folder / 'metrics.jsonl') for run in runs)}: nothing to "
            "draw beside step and seconds; jdaso.report names the keys it knows."
        )
    return found


def draw(runs: Sequence[Run], out: Path | str | None = None) -> Path:
    """Writes a picture of runs; arguments, result and errors are those of :func:`report`."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("A report needs matplotlib: pip install matplotlib") from error

    longest = max(run.columns["seconds"][-1] for run in runs)
    clock, seconds = next(((c, s) for c, s in CLOCKS.items() if longest >= 3 * s), ("s", 1.0))
    units = {"step": 1.0, "seconds": seconds}
    labels = {"step": "optimizer step", "seconds": f"wall-clock time, {clock}"}
    colours = [f"C{i}" for i in range(len(runs))] if len(runs) > 1 else ["k"]
    wanted = panels(runs)
    rows = -(-len(wanted) // 2)
    # Not pyplot: it would look for a display, or change the caller's backend.
    figure = Figure(figsize=(2 * WIDTH, HEIGHT * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for axis in axes[len(wanted) :]:
        axis.set_axis_off()
    for axis, panel in zip(axes, wanted, strict=False):
        for run, colour in zip(runs, colours, strict=True):
            edges = np.append(0, run.columns[panel.x]) / units[panel.x]
            _curves(axis, panel, run, edges, colour)
            if len(runs) == 1:
                _bands(axis, run.phases, edges)
        if panel.log and (panel.values(runs) > 0).all():
            axis.set_yscale("log")
        if panel.with_zero:
            axis.update_datalim([(0, 0)])
        axis.set(xlabel=labels[panel.x], ylabel=panel.label, xlim=(0, None))
        if len(panel.curves) > 1:
            curves = zip(panel.curves.values(), STYLES, strict=True)
            axis.legend(handles=[Line2D([], [], c="k", ls=ls, label=name) for name, ls in curves])
    found = zip(names([run.folder for run in runs]), colours, strict=True)
    legend: list[Line2D | Patch] = [Line2D([], [], c=colour, label=name) for name, colour in found]
    if len(runs) == 1:
        seen = [phase for phase in dict.fromkeys(runs[0].phases) if phase in BANDS]
        legend += [Patch(color=BANDS[phase], alpha=OPACITY, label=phase) for phase in seen]
    figure.legend(handles=legend, loc="outside upper center", ncols=min(4, len(legend)))
    path = Path(out or (runs[0].folder if len(runs) == 1 else Path()) / "report.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format=path.suffix[1:] or "png")
    return path


def _curves(axis: Axes, panel: Panel, run: Run, edges: np.ndarray, colour: str) -> None:
    for key, style in zip(panel.curves, STYLES, strict=False):
        values = run.columns.get(key, np.empty(0))
        there = np.isfinite(values)
        if panel.stairs and there.any():
            axis.stairs(values, edges, baseline=None, color=colour, ls=style)
        elif there.any():
            axis.plot(edges[1:][there], values[there], color=colour, ls=style, marker=".")


def _bands(axis: Axes, phases: list[str], edges: np.ndarray) -> None:
    """A band behind the curves for each phase: its epochs are consecutive lines."""
    spans = zip(phases, edges[:-1], edges[1:], strict=True)
    for phase, group in itertools.groupby(spans, key=lambda span: span[0]):
        epochs = list(group)
        if phase in BANDS:
            axis.axvspan(epochs[0][1], epochs[-1][2], color=BANDS[phase], alpha=OPACITY, lw=0)


def summary(runs: Sequence[Run]) -> str:
    """A table, a line for each run.

    Of a test the best and the last number are shown, of images/s the median; hidden is the share
    of the time in flight for which training was not blocked.
    """

    def cell(run: Run, key: str, form: str, number: Callable = lambda column: column[-1]) -> str:
        return format(number(run.columns[key]), form) if key in run.columns else "-"

    measured = keys_of_tests(runs)
    head = ["run", "steps", "seconds", "final loss"]
    head += [f"{_words(key)}, {which}" for key in measured for which in ("best", "last")]
    rows = [(*head, "images/s", "MB sent", "s blocked", "hidden")]
    for name, run in zip(names([run.folder for run in runs]), runs, strict=True):
        row = [
            name,
            cell(run, "step", ".0f"),
            cell(run, "seconds", ".1f"),
            cell(run, "loss", ".4f"),
        ]
        for key in measured:
            best = np.fmin if any(word in key for word in LOWER_IS_BETTER) else np.fmax
            row += [cell(run, key, ".4f", best.reduce), cell(run, key, ".4f")]
        row += [cell(run, "images_per_second", ".0f", np.nanmedian)]
        row += [cell(run, "megabytes_sent", ".1f"), cell(run, "seconds_blocked", ".2f")]
        flown = run.columns.get("seconds_in_flight", np.zeros(1))[-1]
        hidden = cell(run, "epoch_hidden", ".1%", lambda column, flown=flown: column.sum() / flown)
        rows.append((*row, hidden if flown > 0 else "-"))
    return table(rows)


def _words(key: str) -> str:
    return key.replace("_", " ")
