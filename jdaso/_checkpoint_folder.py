"""The folder of checkpoints: its names, what is complete, whether all nodes see it."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jdaso._meeting import meet
from jdaso.topology import Topology

_CHECKPOINT = re.compile(r"([0-9]{6,18})_step_([0-9]{1,18})")
_PART = re.compile(r"node_([0-9]{1,9})_of_([0-9]{1,9})")
# A network file system may show a new file late.
_SECONDS_TO_SHOW = 30.0


class Found(NamedTuple):
    """A checkpoint; its parts in the order of nodes, or none if one of them is missing."""

    number: int
    step: int
    path: Path
    parts: list[Path]


def found(directory: Path) -> list[Found]:
    """All checkpoints of a folder, oldest first, also those that are not complete."""
    matches = [(_CHECKPOINT.fullmatch(path.name), path) for path in directory.iterdir()]
    return sorted(Found(int(m[1]), int(m[2]), path, _parts(path)) for m, path in matches if m)


def what_is_there(checkpoint: Path) -> str:
    """Name of a checkpoint that is not complete, and of its parts."""
    names = sorted(part.name for part in checkpoint.iterdir()) if checkpoint.is_dir() else []
    return f"{checkpoint.name} (it has: {', '.join(names[:8]) or 'nothing'})"


def none_complete(checkpoints: Sequence[Found]) -> str:
    """That none of these is complete, and what becomes of them."""
    names = ", ".join(what_is_there(checkpoint.path) for checkpoint in checkpoints)
    return (
        f"no checkpoint in {checkpoints[0].path.parent} is complete: {names}. Training begins at "
        "its first step. They are kept until it is started once more: put aside what you need."
    )


def part_path(directory: Path, number: int, step: int, node: int, num_nodes: int) -> Path:
    """Where a node writes its part; the path exists when all of it is written."""
    return directory / f"{number:06}_step_{step}" / f"node_{node}_of_{num_nodes}"


def check_shared(directory: Path, topology: Topology) -> None:
    """Raises ValueError, on every node, if one does not see what the first writes; collective."""
    if topology.comm is None:
        return
    meet(topology, f"the checkpoints in {directory}")
    name = None
    if topology.rank == 0:
        file, name = tempfile.mkstemp(prefix=".shared_", dir=directory)
        os.close(file)
    name = topology.comm.bcast(name)
    until = time.monotonic() + _SECONDS_TO_SHOW
    while not (seen := Path(name).name in os.listdir(directory)) and time.monotonic() < until:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(topology.comm.allgather(seen)) if not sees]
    if topology.rank == 0:
        os.unlink(name)
    if blind:
        raise ValueError(
            f"directory must be on a file system that all nodes share: what rank 0 writes to "
            f"{directory} is not seen by {', '.join(map(topology.describe, blind))}."
        )


def _parts(checkpoint: Path) -> list[Path]:
    try:
        names = os.listdir(checkpoint)
    except OSError:
        if checkpoint.is_dir():
            raise
        return []  # another node has just deleted it, or it is a file
    for size in sorted({int(match[2]) for match in map(_PART.fullmatch, names) if match}):
        if size > len(names):
            continue  # whatever the name says
        parts = [checkpoint / f"node_{node}_of_{size}" for node in range(size)]
        if all(path.name in names for path in parts):
            return parts
    return []
