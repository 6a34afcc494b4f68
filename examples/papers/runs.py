"""Reads the metrics.jsonl that a training has written.

Each line is one JSON object, written at the end of an epoch. It must have ``step``, the number of
optimizer steps taken, and ``seconds``, the wall-clock time since the training began.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timeline

from jdaso.core.command_line import local_path

FILE = "metrics.jsonl"


class Run(NamedTuple):
    """The metrics of one training.

    Attributes:
        folder: The folder of the training.
        phases: The phase of each line, an empty string where the line has none.
        columns: float64[lines] for each key whose values are numbers, NaN where a line has none.
            Three columns are computed from the totals. ``megabytes_sent`` is ``bytes_sent`` in MB.
            ``epoch_blocked`` and ``epoch_hidden`` are the seconds of an epoch during which
            exchanges were in flight, with training blocked and while training continued.
        exchange: The timeline of an exchange, or None. It is the last one that has a delay.
    """

    folder: Path
    phases: list[str]
    columns: dict[str, np.ndarray]
    exchange: dict[str, Any] | None = None


def read(folder: Path | str) -> Run:
    """Reads the metrics.jsonl of a folder.

    Raises:
        ValueError: If the file does not exist, is empty, or has a line without step or seconds.
    """
    path = local_path(folder, "runs").resolve() / FILE
    if not path.is_file():
        raise ValueError(f"runs: {path} does not exist; give a folder that a training wrote to.")
    lines = read_lines(path)
    if not lines:
        raise ValueError(f"runs: {path} is empty; a training writes a line after each epoch.")
    columns = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(lines)):
        values = [line.get(key) for line in lines]
        if all(value is None or isinstance(value, int | float) for value in values):
            columns[key] = np.array(values, float)
    for key in ("step", "seconds"):
        if key not in columns or not np.isfinite(columns[key]).all():
            raise ValueError(
                f"runs: {path} has a line without the number {key!r}; all lines need it."
            )
    if "bytes_sent" in columns:
        columns["megabytes_sent"] = columns["bytes_sent"] / 1e6
    if {"seconds_blocked", "seconds_in_flight"} <= columns.keys():
        blocked, in_flight = columns["seconds_blocked"], columns["seconds_in_flight"]
        columns["epoch_blocked"] = np.diff(blocked, prepend=0)
        # A wait ends only when its thread runs again, so it may exceed the time in flight.
        hidden = np.maximum.accumulate((in_flight - blocked).clip(min=0))
        columns["epoch_hidden"] = np.diff(hidden, prepend=0)
    phases = [line.get("phase") or "" for line in lines]
    exchanges = [line["exchange"] for line in lines if timeline.is_valid(line.get("exchange"))]
    late = [exchange for exchange in exchanges if exchange["delay"]] or exchanges
    return Run(path.parent, phases, columns, late[-1] if late else None)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl. An incomplete last line is left out.

    Raises:
        ValueError: If any other line is not a JSON object.
    """
    lines = []
    texts = path.read_text(errors="replace").splitlines()
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict):
            lines.append(line)
        elif number == len(texts):
            print(f"{path}, line {number}: this incomplete line is left out", file=sys.stderr)
        else:
            raise ValueError(f"{path}, line {number} is not a JSON object; delete that line.")
    return lines


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest trailing parts of the paths that distinguish them.

    >>> names([Path("/runs/daso"), Path("/runs/easgd")])
    ['daso', 'easgd']
    >>> names([Path("/runs/daso"), Path("/older/daso")])
    ['runs/daso', 'older/daso']
    """
    for depth in range(1, 1 + max(len(folder.parts) for folder in folders)):
        ends = [str(Path(*folder.parts[-depth:])) for folder in folders]
        if len(set(ends)) == len(folders):
            break
    return ends
