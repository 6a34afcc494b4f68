"""``python -m jdaso verify CHECKPOINT``: whether a training could go on from a checkpoint.

It looks at what a training would find out late, or never: whether all parts are there and hold
what was saved, whether nodes stand at the same step, whether numbers are finite, and whether what
all nodes share is the same, bit for bit. No MPI, one process, one part in memory at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdaso._base import JdasoError
from jdaso._checkpoint_folder import Found, found, what_is_there
from jdaso._checkpoint_part import Part, is_finite, orbax, raw, read_part
from jdaso._in_flight import outlines

# Of an averaging's state, what each node has for itself.
_OWN = re.compile(
    r"(skipped|left_out|losses|flights\.\d+\.(sound|exchange|feedback\.residual))(\.|$)"
)
# And of the state of a merge, what all have; that of a user's own merge may be anything.
_SHARED_MERGE = re.compile(r"flights\.\d+\.merge\.(center|anchor|outer)(\.|$)")
_MERGE = re.compile(r"flights\.\d+\.merge(\.|$)")
_HEAD = ("node", "arrays", "MB", "step", "exchanges", "in flight", "skipped", "left out", "finite")


class Summary(NamedTuple):
    """What one part says.

    Attributes:
        row: its line of the table.
        shapes: shape and dtype of each array.
        shared: value, or digest, of each array that all nodes must have alike.
        in_flight: what is in flight, by number.
        defects: what is wrong with it by itself.
    """

    row: tuple[str, ...]
    shapes: dict[str, str]
    shared: dict[str, str]
    in_flight: dict[int, str]
    defects: list[str]


def verify(path: Path) -> tuple[str, list[str]]:
    """Looks at a checkpoint, or at the newest complete one of a folder, if there is one.

    Args:
        path: a checkpoint such as ``000007_step_1200``, or the folder that holds them.

    Returns:
        A table with a line for each node, and a text for each defect.

    Raises:
        ValueError: if there is no checkpoint.
    """
    checkpoint = _chosen(path)
    if not checkpoint.parts:
        return "", [f"{where} is not complete" for where in _incomplete(checkpoint, path)]
    reader, summaries, defects = orbax(), [], []
    for node, place in enumerate(checkpoint.parts):
        try:
            summaries.append(_summary(node, read_part(reader, place)))
        except JdasoError as error:
            defects.append(str(error))
    reader.close()
    for summary in summaries:
        defects += [f"node {summary.row[0]}: {text}" for text in summary.defects]
        defects += _differences(summaries[0], summary)
    rows = [_HEAD, *(summary.row for summary in summaries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    head = [f"{checkpoint.path}, step {checkpoint.step}"]
    head += [f"newer, {where} is not complete" for where in _incomplete(checkpoint, path)]
    return "\n".join(head + lines), defects


def add_command(commands: Any) -> None:
    """Adds ``verify`` to a parser's commands."""
    parser = commands.add_parser("verify", help="check whether a training can go on from there")
    parser.add_argument(
        "checkpoint",
        type=Path,
        help="a checkpoint, or a folder of them, of which the newest complete one",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the table; exits with status 1 and a line for each defect."""
    try:
        table, defects = verify(arguments.checkpoint)
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"jdaso verify: {error}") from error
    print(table)
    if defects and (sound := _sound_before(arguments.checkpoint)):
        defects.append(f"the newest one before it that has no defect is {sound}")
    if defects:
        raise SystemExit("\n".join(f"jdaso verify: {defect}" for defect in defects))
    print("A training can go on from it.")


def _chosen(path: Path) -> Found:
    path = path.absolute()
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}.")
    for one in found(path.parent):
        if one.path.name == path.name:
            return one
    inside = found(path)
    if not inside:
        raise ValueError(f"{path} is no checkpoint, such as 000001_step_9, and holds none.")
    return max(inside, key=lambda one: (bool(one.parts), one.number))


def _incomplete(chosen: Found, asked: Path) -> list[str]:
    """Of a folder, those from it on of which parts are missing."""
    folder = chosen.path.parent
    if asked.absolute() != folder:
        return [] if chosen.parts else [what_is_there(chosen.path)]
    least = chosen.number if chosen.parts else 0
    return [what_is_there(x.path) for x in found(folder) if not x.parts and x.number >= least]


def _sound_before(path: Path) -> str | None:
    """The newest sound checkpoint of a folder, or before a checkpoint."""
    chosen = _chosen(path)
    before = [x for x in found(chosen.path.parent) if x.parts and x.number < chosen.number]
    return next((x.path.name for x in reversed(before) if not verify(x.path)[1]), None)


def _summary(node: int, part: Part) -> Summary:
    arrays = part.state
    # A state of averaging is where flights are; what comes before them is its name.
    roots = sorted(
        {m[1] for name in arrays if (m := re.match(r"(.*?)flights\.\d+\.posted$", name))}
    )
    shared = {
        name: _digest(x)
        for name, x in arrays.items()
        for root in roots
        if name.startswith(root) and _is_shared(name[len(root) :])
    }
    lost = [name for name, x in arrays.items() if not is_finite(x)]
    defects = [f"{name} is not finite" for name in lost]
    defects += [
        text for root in roots for text in _missing_flights(root, arrays, part.in_flight.keys())
    ]

    def number(field: str) -> str:
        return ",".join(str(arrays[root + field]) for root in roots if root + field in arrays)

    size = sum(x.nbytes for x in arrays.values()) / 1e6
    numbers = [number(field) for field in ("step", "exchanges")]
    counts = [number(field) for field in ("skipped", "left_out")]
    flying = ",".join(map(str, part.in_flight)) or "-"
    row = (str(node), str(len(arrays)), f"{size:.1f}", *numbers, flying, *counts)
    return Summary(
        row=(*(cell or "-" for cell in row), "no" if lost else "yes"),
        shapes={name: f"{x.dtype.name}{x.shape}" for name, x in arrays.items()},
        shared=shared,
        in_flight=outlines(part.in_flight),
        defects=defects,
    )


def _is_shared(field: str) -> bool:
    if _MERGE.match(field):
        return _SHARED_MERGE.match(field) is not None
    return _OWN.match(field) is None


def _digest(array: np.ndarray) -> str:
    if array.ndim == 0:
        return str(array)
    return hashlib.sha256(raw(array)).hexdigest()[:16]


def _missing_flights(root: str, arrays: dict[str, np.ndarray], saved: Any) -> list[str]:
    """Exchanges between processes that a state waits for, and that were not saved beside it."""
    texts = []
    for name, posted in arrays.items():
        if match := re.fullmatch(re.escape(root) + r"(flights\.\d+)\.posted", name):
            flight = root + match[1]
            number = arrays.get(f"{flight}.number")
            by_process = f"{flight}.exchange" in arrays  # a ticket; a virtual cluster has sums
            if posted and by_process and number is not None and int(number) not in saved:
                texts.append(f"exchange {int(number)} of {flight} is in flight and was not saved")
    return texts


def _differences(first: Summary, other: Summary) -> list[str]:
    """In what a part differs from the first one, and must not."""
    who = f"node {other.row[0]} differs from node {first.row[0]}"
    if first.shapes != other.shapes:
        names = sorted(
            name
            for name in first.shapes | other.shapes
            if first.shapes.get(name) != other.shapes.get(name)
        )
        name = names[0]
        return [
            f"{who}: {name} is {other.shapes.get(name, 'missing')}, not "
            f"{first.shapes.get(name, 'missing')} ({len(names)} arrays differ in shape or type)"
        ]
    texts = [
        f"{who}: {name} is {other.shared[name]}, not {x}"
        for name, x in first.shared.items()
        if other.shared[name] != x
    ]
    if first.in_flight != other.in_flight:
        texts.append(f"{who}: in flight is {other.in_flight}, not {first.in_flight}")
    return texts
