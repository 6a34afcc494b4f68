"""Who am I: nodes, local devices, and the communicators between them."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import sys
import traceback
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdaso._base import JdasoError
from jdaso._layout import Place, Process, arrange
from jdaso.local import LOCAL_AXIS, use_enough_threads


@dataclasses.dataclass(frozen=True)
class Topology:
    """The cluster as one process sees it.

    A node is either one process with all its devices, or several processes with one device
    each. The devices of a node are numbered by their local index.

    Attributes:
        rank: this process among all.
        processes: what every process told of itself, by rank.
        places: where every process stands, by rank.
        processes_per_node: 1, or the number of devices of a node.
        devices: this process's share of its node's devices.
        comm: an MPI communicator of the library's own over all processes; None without MPI.
    """

    rank: int
    processes: tuple[Process, ...]
    places: tuple[Place, ...]
    processes_per_node: int
    devices: tuple[jax.Device, ...]
    comm: Any

    @property
    def host(self) -> str:
        """Name of the host this process runs on."""
        return self.processes[self.rank].host

    @property
    def node(self) -> int:
        """Index of this process's node."""
        return self.places[self.rank].node

    @property
    def num_nodes(self) -> int:
        """Number of nodes, P in the papers."""
        return len(self.processes) // self.processes_per_node

    @property
    def local_rank(self) -> int:
        """Index of this process among those of its node."""
        return self.places[self.rank].local_rank

    @property
    def num_local_devices(self) -> int:
        """Devices of a node, over all its processes; L in the papers."""
        return self.processes_per_node * len(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """This process's devices as a one-dimensional mesh with the axis ``"local"``."""
        return Mesh(np.array(self.devices), (LOCAL_AXIS,), axis_types=(AxisType.Auto,))

    def describe(self, rank: int) -> str:
        """A rank with its host, for error messages."""
        return f"rank {rank} ({self.processes[rank].host})"

    def group_communicators(self) -> list[Any]:
        """New communicators, one per local index; collective over all processes.

        The l-th one joins the devices of local index l, one per node in the order of nodes; None
        where this process has no such device. Each user asks for its own, none is ever shared.
        """
        if self.comm is None:
            return [None] * self.num_local_devices
        if self.processes_per_node == 1:
            indices = range(self.num_local_devices)
            return [self.comm.Split(color=0, key=self.node) for _ in indices]
        own = self.comm.Split(color=self.local_rank, key=self.node)
        return [own if i == self.local_rank else None for i in range(self.num_local_devices)]

    def node_communicator(self) -> Any:
        """A new communicator of the processes of this node; collective over all processes."""
        if self.comm is None:
            return None
        return self.comm.Split(color=self.node, key=self.local_rank)


def discover_topology(processes_per_node: int | None = None) -> Topology:
    """Finds nodes, local devices and this process's place among them; collective.

    Processes that share memory are on one host. A process alone on its host is a node with all
    its devices (``srun --ntasks-per-node=1``). Several processes on a host are one node with one
    accelerator each (``--ntasks-per-node=4`` on hosts with 4 GPUs); average their gradients with
    ``local_value_and_grad(..., across=process_mean(topology))``. CPU devices belong to the
    process that made them, so on CPU every process is a node.

    An uncaught exception in any process ends all of them from now on: a process that is left
    alone would wait for ever.

    Args:
        processes_per_node: how many processes make a node; None decides as described.

    Returns:
        The :class:`jdaso.Topology`. Without MPI, or without a launcher, one node.

    Raises:
        JdasoError: if MPI was started wrongly (a launcher without its MPI plugin leaves every
            process alone; threads not supported), if nodes have unequal numbers of devices, or
            if processes and devices do not match.

    >>> import jdaso
    >>> jdaso.discover_topology().num_nodes
    1
    """
    use_enough_threads()
    comm = _world()
    rank = comm.Get_rank() if comm is not None else 0
    visible = tuple(jax.local_devices())
    shared_with = rank
    if comm is not None:
        from mpi4py import MPI

        on_host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
        shared_with = on_host.allreduce(rank, op=MPI.MIN)
        on_host.Free()
    own = Process(rank, socket.gethostname(), shared_with, visible[0].platform, len(visible))
    processes = tuple(comm.allgather(own)) if comm is not None else (own,)
    per_node, places = arrange(processes, processes_per_node)
    devices = visible
    if per_node > 1 and len(visible) > 1:
        devices = (visible[places[rank].local_rank],)
    if len(processes) > 1:
        _abort_on_exception(comm, f"rank {rank} ({own.host})")
    return Topology(rank, processes, places, per_node, devices, comm)


def _world() -> Any:
    """A duplicate of MPI's world, or None where there is no MPI and none is needed."""
    expected, launcher = _launched_processes()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if expected > 1:
            raise JdasoError(
                f"{launcher} started {expected} processes, but mpi4py cannot be used: {error}. "
                "Install it with: pip install mpi4py"
            ) from error
        return None
    size = MPI.COMM_WORLD.Get_size()
    if size == 1 and expected > 1:
        raise JdasoError(
            f"{launcher} started {expected} processes on {socket.gethostname()} and others, but "
            f"MPI sees only this one. The launcher does not speak the language of this MPI "
            f"({library(MPI)}): with srun, MPICH and its relatives need --mpi=pmi2, Open MPI "
            "needs --mpi=pmix; mpiexec must be the one that belongs to this MPI library."
        )
    if size > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JdasoError(
            f"MPI was initialised with thread level {thread_level(MPI)}, but exchanges in the "
            "background need MPI_THREAD_MULTIPLE. Leave mpi4py.rc.thread_level at 'multiple', "
            "and let nothing initialise MPI before mpi4py does."
        )
    return MPI.COMM_WORLD.Dup()


def _launched_processes() -> tuple[int, str]:
    """How many processes a launcher says it has started, and its name."""
    env = os.environ
    # Only inside a step: a batch shell has the variables of the job, but is no task of it.
    if "SLURM_STEP_ID" in env and "SLURM_STEP_NUM_TASKS" in env and "SLURM_PROCID" in env:
        return int(env["SLURM_STEP_NUM_TASKS"]), "srun"
    for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"):
        if variable in env:
            return int(env[variable]), "mpiexec"
    return 1, "nobody"


def _abort_on_exception(comm: Any, who: str) -> None:
    def hook(kind, error, trace):
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stdout.flush()
        print(f"{text}jdaso: {who} failed, ending all processes.", file=sys.stderr, flush=True)
        comm.Abort(1)

    sys.excepthook = hook


def library(mpi: Any) -> str:
    """Name and version of the MPI library, on one line."""
    return " ".join(mpi.Get_library_version().strip("\x00").splitlines()[0].split())


def thread_level(mpi: Any) -> str:
    """The thread level that MPI was initialised with."""
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    values = [getattr(mpi, f"THREAD_{level}") for level in levels]
    return levels[values.index(mpi.Query_thread())]
