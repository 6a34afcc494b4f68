"""The topology of a job: nodes, local devices, and the communicators between them."""

import dataclasses
import functools
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import Self

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdaso.cluster import launch_environment
from jdaso.cluster.abort import abort, abort_alone, abort_on_exception, at_exit
from jdaso.cluster.heartbeat import EXIT_NODE_LOST, Heartbeat, start_heartbeat
from jdaso.cluster.join_node import join_node
from jdaso.cluster.local_devices import LOCAL_AXIS, use_enough_threads
from jdaso.cluster.mpi_start import start_mpi
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.placement import Placement, Process, assign_nodes, fill_nodes
from jdaso.cluster.process_records import DEVICES, HOST, gather, memory_group, processes_of
from jdaso.core.types import JdasoError
from jdaso.core.validation import check_whole


@dataclasses.dataclass(frozen=True)
class Topology:
    """The cluster as one process sees it.

    A node is one JAX program: one process with all its devices, or several joined processes with
    one device each. The devices of a node are numbered by their local index.

    Attributes:
        processes: Host and devices of every process, by rank.
        placements: Node and local rank of every process, by rank.
        processes_per_node: 1, or the number of devices of a node.
        devices: Devices that this process uses.
        comm: MPI communicator over all processes, used only by jdaso; None without MPI.
        heartbeat: Heartbeats between the processes; None for a single process.
    """

    rank: int
    processes: tuple[Process, ...]
    placements: tuple[Placement, ...]
    processes_per_node: int
    devices: tuple[jax.Device, ...]
    comm: Comm | None
    heartbeat: Heartbeat | None = None

    @property
    def host(self) -> str:
        """Name of the host of this process."""
        return self.processes[self.rank].host

    @property
    def node(self) -> int:
        """Index of this process's node."""
        return self.placements[self.rank].node

    @property
    def num_nodes(self) -> int:
        """Number of nodes, P in the papers."""
        return len(self.processes) // self.processes_per_node

    @property
    def local_rank(self) -> int:
        """Index of this process among those of its node."""
        return self.placements[self.rank].local_rank

    @property
    def joined(self) -> bool:
        """Whether several processes are joined into the program of a node."""
        return self.processes_per_node > 1

    @property
    def num_local_devices(self) -> int:
        """Number of devices of a node, over all its processes; L in the papers."""
        return self.processes_per_node * len(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices of this JAX program as a one-dimensional mesh with the axis ``"local"``."""
        devices = self.devices
        if self.joined:
            devices = tuple(sorted(jax.devices(), key=lambda device: device.process_index))
        return Mesh(np.array(devices), (LOCAL_AXIS,), axis_types=(AxisType.Auto,))

    def restricted_to(self, ranks: Sequence[int], comm: Comm) -> Self:
        """The topology of some processes, one per node, with their communicator.

        They keep their ranks among all processes, which errors and the heartbeat refer to.
        """
        return dataclasses.replace(
            self,
            rank=ranks.index(self.rank),
            processes=tuple(self.processes[rank] for rank in ranks),
            placements=tuple(Placement(node, 0) for node in range(len(ranks))),
            processes_per_node=1,
            comm=comm,
        )

    def describe(self, rank: int) -> str:
        """Names a rank and its host, for error messages."""
        process = self.processes[rank]
        return f"rank {process.rank} ({process.host})"

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks, their hosts, and whether each is alive, for error messages."""
        if self.heartbeat is None:
            return ", ".join(map(self.describe, sorted(ranks)))
        return self.heartbeat.states(frozenset(self.processes[rank].rank for rank in ranks))

    def abort(self, reason: str) -> None:
        """Ends all processes with status 1, or ``EXIT_NODE_LOST`` if a process is silent."""
        if self.heartbeat is None:
            abort_alone(reason)
        else:
            _abort_all(self.heartbeat, reason)

    def duplicate_comm(self) -> Comm:
        """A new communicator over all processes, with messages of its own; collective."""
        return _created(self._comm().Dup)

    def across_nodes(self) -> Comm:
        """A new communicator of one process of each node, in the order of nodes; collective.

        It connects the processes with the local rank of this one.
        """
        comm = self._comm()
        return _created(lambda: comm.Split(color=self.local_rank, key=self.node))

    def within_node(self) -> Comm:
        """A new communicator of the processes of this node; collective over all processes."""
        comm = self._comm()
        return _created(lambda: comm.Split(color=self.node, key=self.local_rank))

    def _comm(self) -> Comm:
        if self.comm is None:
            raise JdasoError("this requires MPI: install mpi4py, and start with mpiexec or srun.")
        return self.comm


def _created(create: Callable[[], Comm]) -> Comm:
    """The communicator that ``create`` returns. Says what to do if MPI can create no more."""
    try:
        return create()
    except Exception as error:
        raise JdasoError(
            f"MPI cannot create another communicator: {error}. Every exchange and mpi_center needs "
            "several: create them once and use them again, or call exchange.close() on all "
            "processes. An mpi_center keeps its own until the end."
        ) from error


def discover_topology(
    processes_per_node: int | None = None, join_processes: bool = False
) -> Topology:
    """Finds the nodes, the local devices and the placement of this process; collective.

    Processes that share memory are on one host.

    - A process alone on its host is a node with all its devices (``srun --ntasks-per-node=1``).
    - With ``join_processes``, the processes of a host are one node, with one device each
      (``--ntasks-per-node=4`` on hosts with 4 GPUs).
    - Otherwise every process is a node. Where several processes of a host have accelerators,
      ``processes_per_node=1`` must say so.

    From now on, all processes are aborted when one fails, because the others would wait for it
    forever. Each prints the reason to stderr. The exit status is 1 after an uncaught exception. It
    is ``EXIT_NODE_LOST`` (69) if a process has died, or was silent until an exchange timed out:
    start the job again from the last checkpoint. A launcher that kills the other processes itself
    has another status, such as 9 or 137. Only workers of :func:`jdaso.center.mpi_center` end alone.

    Args:
        processes_per_node: Number of processes that make a node; None decides as described. It is 1
            if each process is a node. If it is more, these processes must be joined.
        join_processes: Whether to join the processes of each node into one JAX program, as
            ``jax.distributed.initialize`` does. ``mesh`` then has all devices of the node,
            ``jax.devices()`` those of the node, and ``jax.local_devices()`` that of the process. It
            must be the first use of JAX's devices. If the program has called
            ``jax.distributed.initialize`` for the processes of each node, they are joined already.

    Returns:
        The :class:`jdaso.Topology`. Without MPI or without a launcher it has one node, with a
        warning if this is a Slurm job of several tasks.

    Raises:
        ValueError: If ``processes_per_node`` is below 1.
        JdasoError: If the launcher's MPI plugin does not match, if MPI does not support threads,
            if nodes have unequal numbers of devices, if processes and devices do not match, if a
            JAX program has other processes than those of one node, or if the processes of a node
            are not joined. The message then says what to do.

    >>> import jdaso
    >>> jdaso.discover_topology().num_nodes
    1
    """
    if processes_per_node is not None:
        check_whole("processes_per_node", processes_per_node, 1)
    use_enough_threads()
    comm = start_mpi()
    rank = comm.Get_rank() if comm is not None else 0
    hosts = gather(comm, HOST, socket.gethostname().encode(), memory_group(comm))
    # Before JAX, because a process that finds no device must not leave the others waiting.
    heartbeat = _start_heartbeat(comm, hosts) if comm is not None and len(hosts) > 1 else None
    if join_processes and comm is not None:
        groups, names = hosts["memory_group"], [name.decode() for name in hosts["host"]]
        per_node = processes_per_node or int(np.bincount(groups).max())
        join_node(comm, fill_nodes(groups, names, per_node)[rank], per_node)
    visible = tuple(jax.local_devices())
    program = jax.process_count(), jax.process_index()
    devices = gather(comm, DEVICES, visible[0].platform.encode(), len(visible), *program)
    processes = processes_of(hosts, devices)
    per_node, placements = assign_nodes(processes, processes_per_node)
    if len(processes) == 1 and (warning := launch_environment.missing_srun(os.environ)):
        warnings.warn(f"jdaso: {warning}", RuntimeWarning, stacklevel=2)
    return Topology(rank, processes, placements, per_node, visible, comm, heartbeat)


def _start_heartbeat(comm: Comm, hosts: np.ndarray) -> Heartbeat:
    """Starts the heartbeat. From now on all processes are aborted when one of them fails."""

    def describe(rank: int) -> str:
        return f"rank {rank} ({hosts['host'][rank].decode()})"

    own = describe(comm.Get_rank())
    try:
        heartbeat = start_heartbeat(comm, hosts["memory_group"], describe, abort)
    except Exception as error:
        if comm.Get_size() > 1:  # the others wait for this one
            reason = f"{own} failed: its heartbeat cannot start: {type(error).__name__}: {error}"
            abort(reason, 1, all_abort=False)
        raise
    at_exit(heartbeat.close)
    abort_on_exception(own, functools.partial(_abort_all, heartbeat))
    return heartbeat


def _abort_all(heartbeat: Heartbeat, reason: str) -> None:
    status = EXIT_NODE_LOST if heartbeat.silent_ranks() else 1
    abort(reason, status, all_abort=heartbeat.broadcast_abort(reason, status))
