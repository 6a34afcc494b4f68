"""Who am I: nodes, local devices, and the communicators between them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import socket
import warnings
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdaso._at_exit import at_exit
from jdaso._base import JdasoError
from jdaso._ending import end, end_on_exception
from jdaso._heartbeat import EXIT_NODE_LOST, Heartbeat, start_heartbeat
from jdaso._launcher import forgotten, lacking, launched, why_alone
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
        heartbeat: tells who is silent, and others why this process ends; None for one alone.
    """

    rank: int
    processes: tuple[Process, ...]
    places: tuple[Place, ...]
    processes_per_node: int
    devices: tuple[jax.Device, ...]
    comm: Any
    heartbeat: Heartbeat | None = None

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

    def within(self, comm: Any) -> Topology:
        """What is left in a communicator of some of the processes, one per node; collective."""
        left = comm.allgather(self.rank)
        return dataclasses.replace(
            self,
            rank=left.index(self.rank),
            processes=tuple(self.processes[rank] for rank in left),
            places=tuple(Place(node, 0) for node in range(len(left))),
            comm=comm,
        )

    def describe(self, rank: int) -> str:
        """A rank with its host, for error messages."""
        process = self.processes[rank]
        return f"rank {process.rank} ({process.host})"

    def states(self, ranks: frozenset[int]) -> str:
        """Ranks with their hosts, and whether each is alive, for error messages."""
        if self.heartbeat is None:
            return ", ".join(map(self.describe, sorted(ranks)))
        return self.heartbeat.states(frozenset(self.processes[rank].rank for rank in ranks))

    def end_all(self, reason: str) -> None:
        """Ends all processes; each says why on stderr.

        The exit status is 1, or ``EXIT_NODE_LOST`` where one of them is silent.
        """
        if self.heartbeat is None:
            raise SystemExit(reason)
        _end_all(self.comm, self.heartbeat, reason)

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

    From now on all processes end when one of them fails, since those that are left would wait for
    ever; each says why on stderr. The exit status is 1 after an uncaught exception, and
    ``EXIT_NODE_LOST`` (69) when a process has died, by whatever signal, or was silent until an
    exchange was given up: to be started again, from the last checkpoint. (A launcher that ends the
    others itself when one is killed has a status of its own, such as 9 or 137.) Only workers of
    :func:`jdaso.mpi_center` end alone.

    Args:
        processes_per_node: how many processes make a node; None decides as described.

    Returns:
        The :class:`jdaso.Topology`. Without MPI, or without a launcher, one node; if it is in a
        Slurm job of several tasks, with a warning.

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
    # First of all: a process that finds no device must not leave the others waiting.
    heartbeat = _watched(comm) if comm is not None and comm.Get_size() > 1 else None
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
    if len(processes) == 1 and (warning := forgotten(os.environ)):
        warnings.warn(f"jdaso: {warning}", RuntimeWarning, stacklevel=2)
    return Topology(rank, processes, places, per_node, devices, comm, heartbeat)


def _watched(comm: Any) -> Heartbeat:
    """A heartbeat; from now on all processes end when one of them fails."""
    hosts = comm.allgather(socket.gethostname())

    def describe(rank: int) -> str:
        return f"rank {rank} ({hosts[rank]})"

    heartbeat = start_heartbeat(comm, describe, functools.partial(end, comm))
    at_exit(heartbeat.close)
    end_on_exception(describe(comm.Get_rank()), functools.partial(_end_all, comm, heartbeat))
    return heartbeat


def _end_all(comm: Any, heartbeat: Heartbeat, reason: str) -> None:
    status = EXIT_NODE_LOST if heartbeat.silent() else 1
    heartbeat.tell(reason, status)
    end(comm, reason, status)


def _world() -> Any:
    """A duplicate of MPI's world, or None where there is no MPI and none is needed."""
    launch = launched(os.environ)
    os.environ.update(lacking(os.environ, _installed("mpich")))  # the import starts MPI
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if launch.processes > 1:
            raise JdasoError(
                f"{launch.launcher} started {launch.processes} processes, but mpi4py cannot be "
                f"used: {error}. Install it with: pip install mpi4py"
            ) from error
        return None
    size = MPI.COMM_WORLD.Get_size()
    if size == 1 and launch.processes > 1:
        raise JdasoError(why_alone(launch, library(MPI), socket.gethostname()))
    if size > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JdasoError(
            f"MPI was initialised with thread level {thread_level(MPI)}, but exchanges in the "
            "background need MPI_THREAD_MULTIPLE. Leave mpi4py.rc.thread_level at 'multiple', "
            "and let nothing initialise MPI before mpi4py does."
        )
    return MPI.COMM_WORLD.Dup()


def _installed(package: str) -> str | None:
    """The version of a package; None if there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def library(mpi: Any) -> str:
    """Name and version of the MPI library, on one line."""
    return " ".join(mpi.Get_library_version().strip("\x00").splitlines()[0].split())


def thread_level(mpi: Any) -> str:
    """The thread level that MPI was initialised with."""
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    values = [getattr(mpi, f"THREAD_{level}") for level in levels]
    return levels[values.index(mpi.Query_thread())]
