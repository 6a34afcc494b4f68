"""Who am I: nodes, local devices, and the communicators between them."""

from __future__ import annotations

import dataclasses
import functools
import os
import socket
import sys
import traceback
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdaso._base import JdasoError
from jdaso.local import LOCAL_AXIS, use_enough_threads


class Process(NamedTuple):
    """What a process tells the others of itself."""

    rank: int
    host: str
    shared_with: int  # smallest rank among the processes that share this one's memory
    platform: str
    num_devices: int


class Place(NamedTuple):
    """Where a process stands: its node, and its index among the node's processes."""

    node: int
    local_rank: int


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

        The l-th one joins the devices of local index l, one per node; None where this process
        has no such device. Each user of MPI asks for its own, none is ever shared.
        """
        if self.comm is None:
            return [None] * self.num_local_devices
        if self.processes_per_node == 1:
            return [self.comm.Dup() for _ in range(self.num_local_devices)]
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


def arrange(
    processes: tuple[Process, ...], processes_per_node: int | None
) -> tuple[int, tuple[Place, ...]]:
    """Assigns processes to nodes; a pure function, so every process finds the same.

    Args:
        processes: all of them, by rank.
        processes_per_node: as in :func:`discover_topology`.

    Returns:
        Processes per node, and the place of each process.

    Raises:
        JdasoError: if processes and devices do not match, naming the hosts.
    """
    hosts: dict[int, list[Process]] = {}
    for process in processes:
        hosts.setdefault(process.shared_with, []).append(process)
    groups = list(hosts.values())
    if processes_per_node is None:
        on_cpu = all(process.platform == "cpu" for process in processes)
        per_node = 1 if on_cpu else max(len(group) for group in groups)
    else:
        per_node = processes_per_node
    if per_node < 1:
        raise ValueError(f"processes_per_node must be at least 1, got {processes_per_node}.")
    uneven = [group for group in groups if len(group) % per_node]
    if uneven:
        raise JdasoError(
            f"cannot make nodes of {per_node} processes each: there are "
            + _listed(f"{len(group)} on {group[0].host}" for group in groups)
            + ". Start the same number on every host, or say processes_per_node=1 to make each "
            "process a node."
        )
    nodes = [
        group[first : first + per_node]
        for group in groups
        for first in range(0, len(group), per_node)
    ]
    _check_devices(nodes, per_node)
    places = {
        process.rank: Place(node, local_rank)
        for node, members in enumerate(nodes)
        for local_rank, process in enumerate(members)
    }
    return per_node, tuple(places[rank] for rank in range(len(processes)))


def _check_devices(nodes: list[list[Process]], per_node: int) -> None:
    counts = [[process.num_devices for process in node] for node in nodes]
    if len({count for node in counts for count in node}) > 1:
        raise JdasoError(
            "nodes have unequal numbers of devices: "
            + _listed(
                f"node {i} ({node[0].host}) {'+'.join(map(str, count))}"
                for i, (node, count) in enumerate(zip(nodes, counts, strict=True))
            )
            + ". Make the same number visible on every node (CUDA_VISIBLE_DEVICES)."
        )
    visible = counts[0][0]
    if per_node > 1 and visible not in (1, per_node):
        problem = "more ranks than devices" if visible < per_node else "more devices than ranks"
        raise JdasoError(
            f"{problem}: {per_node} processes of node 0 ({nodes[0][0].host}) see {visible} "
            f"devices each. Start one process per node, or {visible} for one per device; if each "
            "process has devices of its own, say processes_per_node=1."
        )


def _world() -> Any:
    """A duplicate of MPI's world, or None where there is no MPI and none is needed."""
    expected, launcher = _launched_processes()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if expected > 1:
            raise JdasoError(
                f"{launcher} started {expected} processes, but mpi4py cannot be used: {error}. "
                "Install it with: pip install 'jdaso[mpi]'"
            ) from error
        return None
    size = MPI.COMM_WORLD.Get_size()
    if size == 1 and expected > 1:
        raise JdasoError(
            f"{launcher} started {expected} processes on {socket.gethostname()} and others, but "
            f"MPI sees only this one. The launcher does not speak the language of this MPI "
            f"({_library(MPI)}): with srun, MPICH and its relatives need --mpi=pmi2, Open MPI "
            "needs --mpi=pmix; mpiexec must be the one that belongs to this MPI library."
        )
    if size > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JdasoError(
            f"MPI was initialised with thread level {_thread_level(MPI)}, but exchanges in the "
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


def _library(mpi: Any) -> str:
    return mpi.Get_library_version().splitlines()[0].strip("\x00 ")


def _thread_level(mpi: Any) -> str:
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    values = [getattr(mpi, f"THREAD_{level}") for level in levels]
    return levels[values.index(mpi.Query_thread())]


def _listed(parts) -> str:
    return ", ".join(parts)


def table(topology: Topology) -> str:
    """The topology as text, a line per process; collective over all processes.

    >>> import jdaso
    >>> print(table(jdaso.discover_topology()).splitlines()[0].split()[:3])
    ['rank', 'host', 'node']
    """
    if topology.comm is None:
        library, level = "none", "-"
    else:
        from mpi4py import MPI

        library, level = _library(MPI), _thread_level(MPI)
    groups = topology.group_communicators()
    joined = " ".join(
        f"{index}:{'-' if group is None else group.Get_size()}"
        for index, group in enumerate(groups)
    )
    for group in groups:
        if group is not None:
            group.Free()
    last = topology.local_rank + len(topology.devices) - 1
    row = (
        str(topology.rank),
        topology.host,
        str(topology.node),
        str(topology.local_rank) if topology.processes_per_node > 1 else f"0..{last}",
        ",".join(f"{d.platform}:{d.id}" for d in topology.devices),
        joined,
        level,
        library,
    )
    rows = [row] if topology.comm is None else topology.comm.allgather(row)
    head = (
        "rank",
        "host",
        "node",
        "local index",
        "devices",
        "communicators (index:size)",
        "threads",
        "MPI library",
    )
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *rows]
    )
