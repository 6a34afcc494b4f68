"""The folder of checkpoints: which are complete, which are deleted, and which job may write there.

A part gets its name when all of it is written. A checkpoint is complete when it has all parts, and
it loses its name before any of it is deleted, so no program ever reads a half of one.

The lock is a small file that says which process holds it, and whose time of modification that
process renews. The file of a process that is dead does not keep the next job out.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jdaso.cluster.ending import at_exit
from jdaso.cluster.launchers import process_info
from jdaso.cluster.roll_call import name_ranks
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.core.types import JdasoError

_DELETED = ".deleted_"  # before the name of a checkpoint
_CHECKPOINT = re.compile(r"([0-9]{6,18})_step_([0-9]{1,18})")
_PART = re.compile(r"node_([0-9]{1,9})_of_([0-9]{1,9})")
# A network file system may show a new file late.
_SECONDS_TO_SHOW = 30.0
_LOCK = "lock"  # name of its file
RENEW_SECONDS = 30.0
# A holder that has not renewed its lock for so long is dead, or it was stopped.
DEAD_SECONDS = 180.0
_POLL_SECONDS = 0.5
_MAX_BYTES = 4096


class SavedCheckpoint(NamedTuple):
    """A checkpoint; ``parts`` are in the order of nodes, and empty if a part is missing."""

    number: int
    step: int
    path: Path
    parts: list[Path]


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


def delete_between(folder: Path, low: int, high: int) -> None:
    """Deletes the checkpoints with numbers between two others."""
    for left in folder.glob(f"{_DELETED}*"):  # by a job that was killed meanwhile
        shutil.rmtree(left, ignore_errors=True)
    for number, _, path, _ in list_checkpoints(folder):
        if low < number < high:
            with contextlib.suppress(OSError):
                if path.is_symlink():
                    path.unlink()
                elif path.is_dir():
                    renamed = path.rename(path.with_name(f"{_DELETED}{path.name}"))
                    shutil.rmtree(renamed, ignore_errors=True)


def part_path(folder: Path, number: int, step: int, node: int, num_nodes: int) -> Path:
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


class Holder(NamedTuple):
    """The process that holds a lock."""

    run: int = 0  # what rank 0 of a job has drawn; all processes of the job know it
    host: str = "an unknown host"
    kernel: str = ""  # the boot and the namespace in which ``pid`` counts, if that is known
    pid: int = 0
    start: int = 0  # tells the process from a later one with the same number
    job: str = ""  # of Slurm, with its cluster
    restarts: int = 0  # how often Slurm has requeued the job


def this_process(run: int) -> Holder:
    """Describes this process as the holder of a lock."""
    pid, environ, kernel = os.getpid(), os.environ, ""
    with contextlib.suppress(OSError):
        # In a container, /proc may belong to another namespace, where the numbers mean others.
        if os.readlink("/proc/self") == str(pid):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            kernel = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    start = info.start if (info := process_info(pid)) else 0
    job, restarts = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_RESTART_COUNT", "")
    if job and (cluster := environ.get("SLURM_CLUSTER_NAME")):
        job = f"{job}@{cluster}"
    count = int(restarts) if restarts.isdecimal() else 0
    return Holder(run, socket.gethostname(), kernel, pid, start, job, count)


class FolderLock:
    """The lock of a folder for the job with the identity ``run``. One process of it holds it."""

    def __init__(self, folder: Path, run: int):
        self.run = run
        self._folder, self._path = folder, folder / _LOCK
        self._own = this_process(run)
        self._released = threading.Event()
        self._cancel_exit: Callable[[], object] | None = None  # None until the first acquire

    def held(self) -> bool:
        return self._read()[0] == self._own

    def acquire(self) -> None:
        """Acquires the lock, unless this process holds it already; JdasoError if another job does.

        A lock whose holder may be dead is watched until the holder renews it, for at most three
        minutes. A job that was killed can thus start again on another host, and is only late.
        """
        if self.held():
            return
        candidate = self._folder / f".{_LOCK}_{self.run:x}_{self._own.pid}"
        candidate.write_text(json.dumps(self._own._asdict()))
        try:
            self._put_in_place(candidate)
        finally:
            candidate.unlink(missing_ok=True)
        if self._cancel_exit is None:
            self._cancel_exit = at_exit(self.release)
            threading.Thread(target=self._renew, name="jdaso-lock", daemon=True).start()

    def release(self) -> None:
        """Removes the lock, if this job holds it, and stops renewing it."""
        self._released.set()
        if self._cancel_exit is not None:
            self._cancel_exit()
        with contextlib.suppress(OSError):
            # It may be that of a process of this job that has died.
            if (holder := self._read()[0]) is not None and holder.run == self.run:
                self._path.unlink()

    def _put_in_place(self, candidate: Path) -> None:
        """Makes a file the lock as soon as there is none of another job that lives."""
        # The clocks of two hosts may differ, but the file system's own has dated this file.
        begin, written = time.monotonic(), candidate.stat().st_mtime
        first = None
        while True:
            seen, waited = self._read(), time.monotonic() - begin
            holder, renewed = seen
            age = max(written + waited - renewed, 0.0)
            if holder is not None and holder.run == self.run:
                os.replace(candidate, self._path)  # of a process of this job that has died
                return
            if holder is None or max(age, waited) > DEAD_SECONDS or is_dead(holder, self._own):
                removed = candidate.with_suffix(".removed")
                if (holder is None or self._remove(seen, removed)) and self._place(candidate):
                    return
            elif first is None:
                first = seen
                logger.warning(
                    "%s is locked by %s. This job waits until that one renews the lock, and then "
                    "ends, or until it is clear that it is dead, which takes up to %g s.",
                    *(self._folder, _name(holder), DEAD_SECONDS),
                )
            elif seen != first:
                raise JdasoError(
                    f"another job writes to {self._folder}: {_name(holder)}, which renewed the "
                    f"lock {age:.0f} s ago. Checkpoints of two jobs would be mixed up. Give this "
                    "job a folder of its own, or start it again when the other one has ended."
                )
            time.sleep(_POLL_SECONDS)

    def _remove(self, seen: tuple[Holder | None, float], removed: Path) -> bool:
        """Removes the lock that was seen, unless another job has replaced it meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, removed)
            if not (was_seen := self._read(removed) == seen):
                self._place(removed)
            removed.unlink(missing_ok=True)
            return was_seen
        return False

    def _place(self, file: Path) -> bool:
        """Makes a file the lock, unless there is one."""
        try:
            os.link(file, self._path)
        except FileExistsError:
            return False
        except OSError:  # this file system has no hard links
            os.replace(file, self._path)
        return True

    def _renew(self) -> None:
        while not self._released.wait(RENEW_SECONDS):
            with contextlib.suppress(OSError):  # the next time will do
                if self.held():
                    os.utime(self._path)

    def _read(self, path: Path | None = None) -> tuple[Holder | None, float]:
        """Returns who holds the lock, and when the file system says that it was renewed."""
        try:
            # Opening a file makes NFS ask its server, which its status alone does not.
            with open(path or self._path, "rb") as file:
                renewed, text = os.fstat(file.fileno()).st_mtime, file.read(_MAX_BYTES)
        except FileNotFoundError:
            return None, 0.0
        try:
            holder = Holder(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return Holder(), renewed
        known = all(type(x) is type(y) for x, y in zip(holder, Holder(), strict=True))
        return holder if known else Holder(), renewed


def is_dead(holder: Holder, own: Holder) -> bool:
    """Returns whether it is certain that a holder does not write any more.

    It is an earlier run of the same requeued job, a process of this host that has ended, or this
    process, which has then opened the folder a second time.
    """
    if own.job and holder.job == own.job and holder.restarts < own.restarts:
        return True
    if not own.kernel or holder.kernel != own.kernel:
        return False
    info = process_info(holder.pid)
    return info is None or info.start != holder.start or holder.pid == own.pid


def _name(holder: Holder) -> str:
    job = f" of Slurm job {holder.job}" if holder.job else ""
    return f"process {holder.pid}{job} on {holder.host}"
