"""What a training has written to metrics.jsonl, read again.

A line is one JSON object, written at the end of an epoch. It must hold ``step``, optimizer steps
taken, and ``seconds``, wall-clock time since the training began.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILE = "metrics.jsonl"


class Run(NamedTuple):
    """A training.

    Attributes:
        folder: where it lies.
        phases: of every line; empty where there is none.
        columns: float64[lines] for every key whose values are numbers; NaN where there is none.
            From the totals come ``megabytes_sent``, ``epoch_blocked`` and ``epoch_hidden``: the
            seconds of an epoch for which exchanges were in flight and training waited, or did not.
    """

    folder: Path
    phases: list[str]
    columns: dict[str, np.ndarray]


def read(folder: Path | str) -> Run:
    """A run's metrics.jsonl as columns.

    Raises:
        ValueError: if it is not there, holds no line, or a line without step or seconds.
    """
    path = Path(folder).resolve() / FILE
    if not path.is_file():
        raise ValueError(f"runs: there is no {path}; name a folder that a training wrote to.")
    lines = read_lines(path)
    if not lines:
        raise ValueError(f"runs: {path} holds no line yet; the first epoch's end brings one.")
    columns = {}
    for key in dict.fromkeys(itertools.chain.from_iterable(lines)):
        values = [line.get(key) for line in lines]
        if all(value is None or isinstance(value, int | float) for value in values):
            columns[key] = np.array(values, float)
    for key in ("step", "seconds"):
        if key not in columns or not np.isfinite(columns[key]).all():
            raise ValueError(f"runs: {path} has lines without the number {key!r}; add it to all.")
    if "bytes_sent" in columns:
        columns["megabytes_sent"] = columns["bytes_sent"] / 1e6
    if {"seconds_blocked", "seconds_in_flight"} <= columns.keys():
        blocked, in_flight = columns["seconds_blocked"], columns["seconds_in_flight"]
        columns["epoch_blocked"] = np.diff(blocked, prepend=0)
        columns["epoch_hidden"] = np.diff(in_flight - blocked, prepend=0)
    return Run(path.parent, [line.get("phase") or "" for line in lines], columns)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; a last one that is only half there is left out.

    Raises:
        ValueError: for any other line that is not a JSON object.
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
            print(f"{path}, line {number}: only half written, left out", file=sys.stderr)
        else:
            raise ValueError(f"{path}, line {number} is not a JSON object; delete that line.")
    return lines


def names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of different paths that tell them apart.

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
