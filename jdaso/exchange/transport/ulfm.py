"""Requirements on MPI's fault tolerance, and workarounds for it."""

import ctypes
import dataclasses
import os
import threading

from jdaso.cluster.abort import at_exit
from jdaso.cluster.mpi_start import library
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.topology import Topology

ON_FAILURE = ("stop", "shrink")
# Set by mpirun --with-ft ulfm.
_OPEN_MPI = "OMPI_MCA_mpi_ft_enable"
_FINALIZE_SECONDS = 10.0


def prepare_to_shrink(topology: Topology) -> Topology:
    """Lets this process survive the death of others; returns a topology for one exchange."""
    _check_can_shrink(topology)
    _limit_finalize()
    if topology.heartbeat is not None:
        # MPI itself reports a death to the operations.
        topology.heartbeat.tolerate_deaths(lambda rank: None, silence=False)
    # Each exchange replaces its communicator independently of the others.
    return dataclasses.replace(topology, comm=topology.duplicate_comm())


def _check_can_shrink(topology: Topology) -> None:
    """Raises ValueError if the job cannot continue without some of its processes."""
    from mpi4py import MPI

    if topology.processes_per_node > 1:
        raise ValueError(
            "on_failure='shrink' requires one process per node, got "
            f"{topology.processes_per_node}: a node that loses a process cannot continue with the "
            "rest."
        )
    probe = MPI.COMM_SELF.Dup()
    try:
        probe.Revoke()
    except NotImplementedError:
        able = False
    else:  # Open MPI always has Revoke, but ends all processes if it was started without ULFM
        able = os.environ.get(_OPEN_MPI) == "1"
    probe.Free()
    if not able:
        raise ValueError(
            f"on_failure='shrink' requires an MPI with fault tolerance, got {library(MPI)} without "
            "it: use Open MPI 5, with mpirun --with-ft ulfm. With any other MPI, use 'stop', and "
            "let the launcher restart the job on the remaining nodes: python -m jdaso sbatch "
            "--min-nodes."
        )


def _limit_finalize() -> None:
    """Limits the time that this process waits in MPI_Finalize at exit.

    Open MPI 5.0 sometimes waits in MPI_Finalize for a process that has died. MPI_Finalized is
    already true then, so nothing else waits.
    """
    if _finalizers:
        return
    from mpi4py import MPI

    exiting = threading.Event()
    # mpi4py's own function would hold the interpreter lock.
    mpi = ctypes.CDLL(MPI.__file__)

    def finalize() -> None:
        exiting.wait()
        mpi.MPI_Finalize()

    # No thread can be started at exit.
    thread = threading.Thread(target=finalize, name="jdaso-finalize", daemon=True)
    thread.start()
    _finalizers.append((exiting, thread))


def _finalize() -> None:
    for exiting, thread in _finalizers:
        exiting.set()
        thread.join(_FINALIZE_SECONDS)


_finalizers: list[tuple[threading.Event, threading.Thread]] = []
# Registered before everything that uses MPI, because exit functions run in reverse order.
at_exit(_finalize)


def is_process_failure(error: BaseException) -> bool:
    """Whether an error of MPI reports that a process has died, or that another one found so."""
    from mpi4py import MPI

    classes = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)
    return isinstance(error, MPI.Exception) and error.Get_error_class() in classes


def has_failed(comm: Comm) -> bool:
    """Whether a process of a communicator has died, or another one has revoked it for that."""
    try:
        comm.Iprobe()  # makes progress
    except Exception as error:
        if not is_process_failure(error):
            raise
        return True
    return comm.Is_revoked() or comm.Get_failed().Get_size() > 0
