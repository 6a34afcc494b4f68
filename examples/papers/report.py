"""Draws the metrics of trainings and prints a table of them.

    python examples/papers/report.py runs/daso               # draws runs/daso/report.png
    python examples/papers/report.py runs/daso runs/dasgd    # draws both together in ./report.png

Each run is a folder with the metrics.jsonl that a training writes. These keys are drawn where they
exist: ``loss``, all keys that begin with ``test_``, ``learning_rate``, ``phase``, ``period``,
``delay``, ``images_per_second``, ``tokens_per_second``, ``drift``, and the totals ``bytes_sent``,
``seconds_blocked`` and ``seconds_in_flight``. ``exchange`` is drawn for a single run: the timeline
of one exchange, see timeline.py.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import timeline
from runs import Run, names, read
from runs import read_lines as read_lines

from jdaso.core.command_line import local_path, path_option, text_table
from jdaso.schedules import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BANDS = dict(zip(PHASES, ("tab:orange", "tab:green", "tab:blue"), strict=True))
OPACITY = 0.12
STYLES = ("-", "--")
TIME_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0}
WIDTH, HEIGHT = 5.5, 2.3  # of a panel, in inches; a figure is two panels wide
LOWER_IS_BETTER = ("loss", "error", "perplexity", "bits")


class Panel(NamedTuple):
    """One set of axes.

    Attributes:
        label: Label of the vertical axis.
        x: Column of the horizontal axis, ``"step"`` or ``"seconds"``.
        curves: One or two columns, each with its name in the legend.
        stairs: Whether a value holds for a whole epoch.
        log: Whether the vertical axis is logarithmic if all values are positive.
        with_zero: Whether the vertical axis includes 0.
    """

    label: str
    x: str
    curves: dict[str, str]
    stairs: bool = False
    log: bool = False
    with_zero: bool = True

    def values(self, runs: Sequence[Run]) -> np.ndarray:
        """All finite values of the panel."""
        found = [run.columns[key] for run in runs for key in self.curves if key in run.columns]
        joined = np.concatenate([np.empty(0), *found])
        return joined[np.isfinite(joined)]


def report(runs: Sequence[Path | str], out: Path | str | None = None) -> Path:
    """Draws one run, or several runs together.

    Args:
        runs: Folders with a metrics.jsonl each.
        out: File to write, in any format that matplotlib supports. The default is report.png in
            the folder of a single run, or in the current folder for several runs.

    Returns:
        The path of the file.

    Raises:
        ValueError: If there is nothing to draw. The message names the metrics file.
        ImportError: If matplotlib is not installed.
    """
    return draw(read_all(runs), out)


def read_all(runs: Sequence[Path | str]) -> list[Run]:
    """Reads the runs. A folder that is given twice is read once.

    Raises:
        ValueError: If ``runs`` is empty, or if a run cannot be read.
    """
    if not runs:
        raise ValueError("runs is empty; give at least one folder with a metrics.jsonl.")
    return [read(run) for run in dict.fromkeys(local_path(run, "runs").resolve() for run in runs)]


def keys_of_tests(runs: Sequence[Run]) -> list[str]:
    """The columns with test scores, in the order of their first appearance."""
    return list(dict.fromkeys(k for run in runs for k in run.columns if k.startswith("test_")))


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The panels to draw. Panels without values are left out.

    Raises:
        ValueError: If no panel has values.
    """
    curves = [("training loss", "loss"), *((_words(key), key) for key in keys_of_tests(runs))]
    wanted = [
        Panel(label, x, {key: ""}, log=key == "loss", with_zero=False)
        for label, key in curves
        for x in ("step", "seconds")
    ]
    times = {"epoch_blocked": "blocked by exchanges", "epoch_hidden": "hidden"}
    wanted += [
        Panel("steps", "step", {"period": "period", "delay": "delay"}, stairs=True),
        Panel("learning rate", "step", {"learning_rate": ""}),
        Panel("images/s", "step", {"images_per_second": ""}),
        Panel("tokens/s", "step", {"tokens_per_second": ""}),
        Panel("replica drift ‖x - mean‖", "step", {"drift": ""}),
        Panel("sent, MB", "step", {"megabytes_sent": ""}),
        Panel("seconds per epoch", "step", times, stairs=True),
    ]
    found = [panel for panel in wanted if len(panel.values(runs))]
    if not found:
        files = ", ".join(str(run.folder / "metrics.jsonl") for run in runs)
        raise ValueError(
            f"runs: there is nothing to draw in {files} besides step and seconds; "
            "examples/papers/report.py lists the keys that it draws."
        )
    return found


class Axis(NamedTuple):
    """A horizontal axis: its label, and its unit in steps or seconds, such as 60 for minutes."""

    label: str
    unit: float


def draw(runs: Sequence[Run], out: Path | str | None = None) -> Path:
    """Draws runs that have been read. Arguments, result and errors are those of :func:`report`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A report needs matplotlib: pip install matplotlib") from error

    colours = [f"C{i}" for i in range(len(runs))] if len(runs) > 1 else ["k"]
    horizontal = _horizontal_axes(runs)
    wanted = panels(runs)
    exchange = runs[0].exchange if len(runs) == 1 else None
    rows = -(-(len(wanted) + (exchange is not None)) // 2)
    # Not pyplot, which looks for a display and may change the backend of the caller.
    figure = Figure(figsize=(2 * WIDTH, HEIGHT * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for axes_of_panel, panel in zip(axes, wanted, strict=False):
        _draw_panel(axes_of_panel, panel, runs, colours, horizontal[panel.x])
    for unused in axes[len(wanted) + (exchange is not None) :]:
        unused.set_axis_off()
    if exchange is not None:
        timeline.draw(axes[len(wanted)], exchange)
    _draw_legend(figure, runs, colours)
    path = local_path(out or (runs[0].folder if len(runs) == 1 else Path()) / "report.png", "out")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format=path.suffix[1:] or "png")
    return path


def _horizontal_axes(runs: Sequence[Run]) -> dict[str, Axis]:
    """The axes of steps and of time. The unit of time suits the longest run."""
    longest = max(run.columns["seconds"][-1] for run in runs)
    name = next((name for name, size in TIME_UNITS.items() if longest >= 3 * size), "s")
    time = Axis(f"wall-clock time, {name}", TIME_UNITS[name])
    return {"step": Axis("optimizer step", 1.0), "seconds": time}


def _draw_panel(
    axes: Axes, panel: Panel, runs: Sequence[Run], colours: list[str], horizontal: Axis
) -> None:
    from matplotlib.lines import Line2D

    for run, colour in zip(runs, colours, strict=True):
        edges = np.append(0, run.columns[panel.x]) / horizontal.unit
        _draw_curves(axes, panel, run, edges, colour)
        if len(runs) == 1:
            _draw_phases(axes, run.phases, edges)
    if panel.log and (panel.values(runs) > 0).all():
        axes.set_yscale("log")
    if panel.with_zero:
        axes.update_datalim([(0, 0)])
    axes.set(xlabel=horizontal.label, ylabel=panel.label, xlim=(0, None))
    if len(panel.curves) > 1:
        curves = zip(panel.curves.values(), STYLES, strict=True)
        axes.legend(handles=[Line2D([], [], c="k", ls=ls, label=name) for name, ls in curves])


def _draw_curves(axes: Axes, panel: Panel, run: Run, edges: np.ndarray, colour: str) -> None:
    for key, style in zip(panel.curves, STYLES, strict=False):
        values = run.columns.get(key, np.empty(0))
        finite = np.isfinite(values)
        if panel.stairs and finite.any():
            axes.stairs(values, edges, baseline=None, color=colour, ls=style)
        elif finite.any():
            axes.plot(edges[1:][finite], values[finite], color=colour, ls=style, marker=".")


def _draw_phases(axes: Axes, phases: list[str], edges: np.ndarray) -> None:
    """Draws a band behind the curves for each group of consecutive epochs in the same phase."""
    spans = zip(phases, edges[:-1], edges[1:], strict=True)
    for phase, group in itertools.groupby(spans, key=lambda span: span[0]):
        epochs = list(group)
        if phase in BANDS:
            axes.axvspan(epochs[0][1], epochs[-1][2], color=BANDS[phase], alpha=OPACITY, lw=0)


def _draw_legend(figure: Figure, runs: Sequence[Run], colours: list[str]) -> None:
    """Names the runs, and the phases if there is only one run."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    named = zip(names([run.folder for run in runs]), colours, strict=True)
    handles: list[Line2D | Patch] = [Line2D([], [], c=colour, label=name) for name, colour in named]
    if len(runs) == 1:
        phases = [phase for phase in dict.fromkeys(runs[0].phases) if phase in BANDS]
        handles += [Patch(color=BANDS[phase], alpha=OPACITY, label=phase) for phase in phases]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)))


def summary(runs: Sequence[Run]) -> str:
    """A table with one row for each run.

    It has the best and the last value of each test score, and the median of the images or tokens
    per second.
    "hidden" is the fraction of the time in flight during which training was not blocked.
    """
    measured = keys_of_tests(runs)
    head = ["run", "steps", "seconds", "final loss"]
    head += [f"{_words(key)}, {which}" for key in measured for which in ("best", "last")]
    speed = "tokens" if any("tokens_per_second" in run.columns for run in runs) else "images"
    rows = [(*head, f"{speed}/s", "MB sent", "s blocked", "hidden")]
    for name, run in zip(names([run.folder for run in runs]), runs, strict=True):
        row = [name, _cell(run, "step", ".0f"), _cell(run, "seconds", ".1f")]
        row += [_cell(run, "loss", ".4f")]
        for key in measured:
            best = np.fmin if any(word in key for word in LOWER_IS_BETTER) else np.fmax
            row += [_cell(run, key, ".4f", best.reduce), _cell(run, key, ".4f")]
        row += [_cell(run, f"{speed}_per_second", ".0f", np.nanmedian)]
        row += [_cell(run, "megabytes_sent", ".1f"), _cell(run, "seconds_blocked", ".2f")]
        rows.append((*row, _hidden_fraction(run)))
    return text_table(rows)


def _hidden_fraction(run: Run) -> str:
    """The fraction of the time in flight during which training went on."""
    in_flight = run.columns.get("seconds_in_flight", np.zeros(1))[-1]
    if "epoch_hidden" not in run.columns or not in_flight > 0:
        return "-"
    return f"{run.columns['epoch_hidden'].sum() / in_flight:.1%}"


def _last(column: np.ndarray) -> float:
    return column[-1]


def _cell(run: Run, key: str, form: str, number: Callable[..., float] = _last) -> str:
    return format(number(run.columns[key]), form) if key in run.columns else "-"


def _words(key: str) -> str:
    return key.replace("_", " ")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Draw the metrics of trainings, and compare them in a table."
    )
    parser.add_argument(
        "runs", type=path_option, nargs="+", metavar="RUN", help="folder with a metrics.jsonl"
    )
    parser.add_argument(
        "--out",
        type=path_option,
        help="file to write; default: report.png in the folder of a single run, or in the current "
        "folder for several runs",
    )
    arguments = parser.parse_args()
    try:
        runs = read_all(arguments.runs)
        print(f"{summary(runs)}\n")
        print(draw(runs, arguments.out))
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"report: {error}") from error


if __name__ == "__main__":
    main()
