"""What MPI itself must do for a job to outlive one of its processes: its fault tolerance."""

from __future__ import annotations

import ctypes
import os
import threading

from jdaso._at_exit import at_exit
from jdaso.topology import Topology, library

ON_FAILURE = ("stop", "shrink")
# What mpirun --with-ft ulfm tells its processes.
_OPEN_MPI = "OMPI_MCA_mpi_ft_enable"
_FINALIZE_SECONDS = 10.0


def check_can_shrink(topology: Topology) -> None:
    """Raises ValueError where a job cannot go on without some of its processes."""
    from mpi4py import MPI

    if topology.processes_per_node > 1:
        raise ValueError(
            f"on_failure='shrink' is for one process per node, and there are "
            f"{topology.processes_per_node}: what is left of a node cannot go on."
        )
    probe = MPI.COMM_SELF.Dup()
    try:
        probe.Revoke()
    except NotImplementedError:
        able = False
    else:  # Open MPI has it always, but may have been started to end all when one dies
        able = os.environ.get(_OPEN_MPI) == "1"
    probe.Free()
    if not able:
        raise ValueError(
            f"on_failure='shrink' needs an MPI with fault tolerance, and {library(MPI)} was not "
            "started with it: use Open MPI 5, with mpirun --with-ft ulfm. Elsewhere leave it at "
            "'stop', and let the launcher start again on the nodes that are left: python -m jdaso "
            "sbatch --min-nodes."
        )


def leave_in_time() -> None:
    """At exit, from now on, waits only so long for MPI to end.

    Open MPI 5.0 waits in MPI_Finalize, now and then, for one that has died. By then it answers
    that it has been finalized, so nothing else waits for it.
    """
    if _leaving:
        return
    from mpi4py import MPI

    ending = threading.Event()
    # mpi4py's own function would keep the interpreter, and so who waits for it.
    mpi = ctypes.CDLL(MPI.__file__)

    def finalize() -> None:
        ending.wait()
        mpi.MPI_Finalize()

    # At exit no thread can be started any more.
    thread = threading.Thread(target=finalize, name="jdaso-finalize", daemon=True)
    thread.start()
    _leaving.append((ending, thread))


def _leave() -> None:
    for ending, thread in _leaving:
        ending.set()
        thread.join(_FINALIZE_SECONDS)


# Before anything that uses MPI asks for its own end: what is asked for first is done last.
_leaving: list[tuple[threading.Event, threading.Thread]] = []
at_exit(_leave)


def is_loss(error: BaseException) -> bool:
    """Whether an error of MPI's says that a process has died, or that others have found so."""
    from mpi4py import MPI

    lost = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return isinstance(error, MPI.Exception) and error.Get_error_class() in lost
