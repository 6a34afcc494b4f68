"""Restarts a program as several processes of this machine."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from jdaso.cluster.launchers import MPIEXEC, NO_LAUNCHER, detect_launch


def start(count: int | None) -> None:
    """Replaces this process by ``mpiexec``, which starts ``count`` processes of the same program.

    Does nothing if a launcher has already started the program.

    Args:
        count: Number of processes, or None to do nothing.

    Raises:
        SystemExit: If ``mpiexec`` is not installed.
    """
    if count is None or detect_launch(os.environ).launcher != NO_LAUNCHER:
        return
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    launcher = shutil.which(MPIEXEC.name, path=path)
    if launcher is None:
        raise SystemExit(f"--processes {count} needs mpiexec: pip install mpich")
    sys.stdout.flush()
    os.execv(launcher, [launcher, *MPIEXEC.command(count)[1:], sys.executable, *sys.argv])
