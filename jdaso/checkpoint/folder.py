"""The folder of checkpoints: its layout, which checkpoints are complete, which are deleted.

A part gets its name when all of it is written. A checkpoint is complete when it has all parts, and
it loses its name before any of it is deleted, so no program ever reads a half of one.
"""

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from jdaso.cluster.roll_call import name_ranks
from jdaso.cluster.topology import Topology
from jdaso.core.types import JdasoError

_DELETED = ".deleted_"  # before the name of a checkpoint
_CHECKPOINT = re.compile(r"([0-9]{6,18})_step_([0-9]{1,18})")
_PART = re.compile(r"node_([0-9]{1,9})_of_([0-9]{1,9})")
# A network file system may show a new file late.
_SECONDS_TO_SHOW = 30.0


class SavedCheckpoint(NamedTuple):
    """A checkpoint; ``parts`` are in the order of nodes, and empty if a part is missing."""

    number: int
    step: int
    path: Path
    parts: list[Path]


class CheckpointFolder:
    """The checkpoints of one training, of which the last ``keep`` usable ones are kept."""

    def __init__(self, path: Path, keep: int):
        self.path = path
        self.unusable: set[int] = set()  # numbers of damaged checkpoints
        self.protected_up_to = 0  # the highest number that is not deleted
        self._keep = keep

    def usable(self) -> list[SavedCheckpoint]:
        """Returns the complete checkpoints, oldest first, without the unusable ones."""
        found = list_checkpoints(self.path)
        return [c for c in found if c.parts and c.number not in self.unusable]

    def delete_old(self) -> None:
        """Deletes every checkpoint that is older than the last ``keep`` usable ones."""
        kept = self.usable()[-self._keep :]
        for left in self.path.glob(f"{_DELETED}*"):  # by a job that was killed meanwhile
            shutil.rmtree(left, ignore_errors=True)
        for number, _, path, _ in list_checkpoints(self.path) if kept else ():
            if not self.protected_up_to < number < kept[0].number:
                continue
            with contextlib.suppress(OSError):
                if path.is_symlink():
                    path.unlink()
                elif path.is_dir():
                    renamed = path.rename(path.with_name(f"{_DELETED}{path.name}"))
                    shutil.rmtree(renamed, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[SavedCheckpoint]:
    """Returns all checkpoints, oldest first, also incomplete ones; none without a folder."""
    try:
        paths = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JdasoError(
            f"this process cannot read {folder}: {error.strerror}. Give the folder of the "
            "checkpoints, and its user the right to read it."
        ) from error
    matches = [(_CHECKPOINT.fullmatch(path.name), path) for path in paths]
    return sorted(SavedCheckpoint(int(m[1]), int(m[2]), p, _parts(p)) for m, p in matches if m)


def _parts(checkpoint: Path) -> list[Path]:
    try:
        names = os.listdir(checkpoint)
    except OSError:
        if checkpoint.is_dir():
            raise
        return []  # another node has just deleted it, or it is a file
    for size in sorted({int(match[2]) for match in map(_PART.fullmatch, names) if match}):
        if size > len(names):
            continue  # a folder cannot have more parts than entries, whatever a name says
        parts = [checkpoint / f"node_{node}_of_{size}" for node in range(size)]
        if all(path.name in names for path in parts):
            return parts
    return []


def part_path(folder: Path, number: int, step: int, node: int, num_nodes: int) -> Path:
    """Returns the folder of a node's part, which exists when the whole part is written."""
    return folder / f"{number:06}_step_{step}" / f"node_{node}_of_{num_nodes}"


def describe_incomplete(checkpoint: Path) -> str:
    """Returns the name of an incomplete checkpoint and of its parts, for messages."""
    names = sorted(part.name for part in checkpoint.iterdir()) if checkpoint.is_dir() else []
    return f"{checkpoint.name} (parts: {', '.join(names[:8]) or 'none'})"


def check_shared(folder: Path, topology: Topology) -> None:
    """Raises ValueError on all processes if one cannot see a file of rank 0; collective."""
    topology.group.barrier(f"the checkpoints in {folder}")
    name = None
    if topology.rank == 0:
        file, name = tempfile.mkstemp(prefix=".shared_", dir=folder)
        os.close(file)
    name = topology.group.broadcast(name)

    def is_visible() -> bool:
        with contextlib.suppress(OSError):  # rank 0 has made the folder
            return Path(name).name in os.listdir(folder)
        return False

    until = time.monotonic() + _SECONDS_TO_SHOW
    while not (seen := is_visible()) and time.monotonic() < until:
        time.sleep(0.2)
    blind = [rank for rank, sees in enumerate(topology.group.gather(seen)) if not sees]
    if topology.rank == 0:
        os.unlink(name)
    if blind:
        raise ValueError(
            f"directory must be on a file system that all nodes share, got {folder}: "
            f"{name_ranks(blind, topology.describe)} cannot see a file that rank 0 wrote."
        )
