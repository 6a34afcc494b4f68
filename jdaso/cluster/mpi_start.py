"""Starts MPI, checks how it was started, and describes the library."""

import contextlib
import importlib.metadata
import os
import socket
from typing import Any

from jdaso.cluster import launch_environment
from jdaso.cluster.mpi_types import Comm
from jdaso.core.types import JdasoError


def start_mpi() -> Comm | None:
    """A duplicate of MPI.COMM_WORLD; None for a single process without MPI."""
    launch, mpich = launch_environment.detect_launch(os.environ), None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        mpich = importlib.metadata.version("mpich")
    # The import starts MPI.
    os.environ.update(launch_environment.missing_variables(os.environ, mpich))
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if launch.processes > 1:
            raise JdasoError(
                f"{launch.launcher} started {launch.processes} processes, but mpi4py cannot be "
                f"imported on {socket.gethostname()}: {error}. Install it with: pip install mpi4py"
            ) from error
        return None
    size = MPI.COMM_WORLD.Get_size()
    if size == 1 and launch.processes > 1:
        host = socket.gethostname()
        raise JdasoError(launch_environment.explain_single_process(launch, library(MPI), host))
    if size > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JdasoError(
            f"MPI was initialized with thread level {thread_level(MPI)} on {socket.gethostname()}, "
            "but exchanges in the background require MPI_THREAD_MULTIPLE. Leave "
            "mpi4py.rc.thread_level at 'multiple', and let only mpi4py initialize MPI."
        )
    return MPI.COMM_WORLD.Dup()


def library(mpi: Any) -> str:
    """Name and version of the MPI library, on one line."""
    return " ".join(mpi.Get_library_version().strip("\x00").splitlines()[0].split())


def thread_level(mpi: Any) -> str:
    """The thread level that MPI was initialized with."""
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return next(x for x in levels if getattr(mpi, f"THREAD_{x}") == mpi.Query_thread())
