"""Starts a program on several processes of this machine, as a launcher would."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

LAUNCHED = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_ID")


def start(count: int | None) -> None:
    """Gives this process to ``mpiexec``, which starts the same program so many times.

    Returns where a launcher has started the program already, or none is asked for.

    Args:
        count: how many processes; None: as many as there are.

    Raises:
        SystemExit: if there is no ``mpiexec``.
    """
    if count is None or any(name in os.environ for name in LAUNCHED):
        return
    beside_python = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside_python, os.environ.get("PATH", "")])
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        raise SystemExit(f"--processes {count} needs mpiexec: pip install mpich")
    sys.stdout.flush()
    os.execv(launcher, [launcher, "-n", str(count), sys.executable, *sys.argv])
