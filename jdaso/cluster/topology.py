"""The topology of a job: its nodes, their devices, and what its processes do together.

:func:`discover_topology` starts MPI and the heartbeat, learns from all processes where they run,
assigns them to nodes, and returns the :class:`Topology`.
"""

import atexit
import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jdaso.cluster import launchers
from jdaso.cluster.ending import (
    EXIT_NODE_LOST,
    DeathPolicy,
    abort,
    abort_alone,
    abort_on_exception,
    at_exit,
    run_exit_functions,
)
from jdaso.cluster.heartbeat import LOST_SECONDS, Heartbeat, start_heartbeat
from jdaso.cluster.local_devices import LOCAL_AXIS, prepare_devices
from jdaso.cluster.mpi_types import Comm
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.core.validation import check_whole

_BARRIER_SECONDS = 1800.0  # one node may take long to read a checkpoint
_WARNING_SECONDS = 30.0
# The longest pause between two looks at a barrier; a short wait has shorter ones.
_LOOK_SECONDS = 1e-3
# With join_processes, a process that exits waits this long for the others of its node.
_SHUTDOWN_SECONDS = 1800
_PROXY = "grpc_proxy"  # gRPC reads this variable first


class Process(NamedTuple):
    """What a process reports to all others about itself."""

    rank: int
    host: str
    memory_group: int  # smallest rank among the processes that share memory with this one
    platform: str
    num_devices: int
    program_size: int = 1  # processes of its JAX program
    program_index: int = 0  # its index among them


class Placement(NamedTuple):
    """The node of a process, and the index of the process within its node."""

    node: int
    local_rank: int


class Group:
    """The processes of a job, or of one node, and what they do together outside of exchanges.

    All processes of the group must call each method, in the same order.

    Args:
        comm: The communicator of the group; None for a process alone.
        name: Rank and host of this process, for messages.
        states: Names ranks of the group, and says whether each is alive, for messages.

    >>> import jdaso
    >>> group = jdaso.discover_topology().group
    >>> group.gather("of this process"), group.broadcast("of rank 0")
    (['of this process'], 'of rank 0')
    """

    def __init__(self, comm: Comm | None, name: str, states: Callable[[frozenset[int]], str]):
        self.rank = 0 if comm is None else comm.Get_rank()
        self.name, self._comm, self._states = name, comm, states

    def gather(self, value: Any, to_all: bool = True) -> list[Any]:
        """Returns the value of every process, by rank.

        Without ``to_all``, only rank 0 gets them, and the other processes get an empty list.
        """
        if self._comm is None:
            return [value]
        return self._comm.allgather(value) if to_all else self._comm.gather(value) or []

    def broadcast(self, value: Any) -> Any:
        """Returns the value of rank 0 on all processes."""
        return value if self._comm is None else self._comm.bcast(value)

    def barrier(self, what: str, timeout: float = _BARRIER_SECONDS) -> None:
        """Waits until all processes have called it, so that a collective that follows does not.

        MPI's collectives have no deadline, and occupy a core while they wait.

        Args:
            what: The purpose of the barrier, which messages quote.
            timeout: Seconds to wait.

        Raises:
            JdasoError: If a process has not called it within the timeout; it names the processes.
        """
        if self._comm is None:
            return
        others = frozenset(range(self._comm.Get_size())) - {self.rank}
        request, start = self._comm.Ibarrier(), time.monotonic()
        warn_at = min(_WARNING_SECONDS, timeout / 2)
        while not request.Test():
            seconds = time.monotonic() - start
            if seconds > timeout:
                raise JdasoError(
                    f"{self.name} has waited {timeout:g} s for all other processes at the barrier "
                    f"for {what}: {self._states(others)}. Every process must reach this barrier, "
                    "even if it has nothing to do there. Make sure that all of them make the same "
                    "calls."
                )
            if seconds > warn_at:
                warn_at *= 2
                logger.warning(
                    "%s has been waiting for all other processes at the barrier for %s, for "
                    "%.0f s: %s",
                    *(self.name, what, seconds, self._states(others)),
                )
            time.sleep(min(seconds / 16, _LOOK_SECONDS))


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
        comm: MPI communicator over all processes, from which exchanges make their own; None without
            MPI. Programs use ``group``.
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
        """Returns the topology of some processes, one per node, with their communicator.

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

    @functools.cached_property
    def group(self) -> Group:
        """All processes, for what they do together outside of exchanges."""
        return Group(self.comm, self.describe(self.rank), self.states)

    def node_group(self) -> Group:
        """Makes a group of the processes of this node; collective over all processes."""
        ranks = [rank for rank, place in enumerate(self.placements) if place.node == self.node]

        def states(members: frozenset[int]) -> str:
            return self.states(frozenset(ranks[member] for member in members))

        comm = self.within_node() if self.joined else None
        return Group(comm, self.describe(self.rank), states)

    def follow(self, policy: DeathPolicy | None = None) -> Callable[[], None]:
        """Lets a policy say from now on which deaths the job survives.

        None needs all processes of this topology. The result is a function that ends this.
        """
        policy = policy or DeathPolicy(frozenset(process.rank for process in self.processes))
        return (lambda: None) if self.heartbeat is None else self.heartbeat.follow(policy)

    def abort(self, reason: str) -> None:
        """Ends all processes with status 1, or ``EXIT_NODE_LOST`` if a process is silent."""
        if self.heartbeat is None:
            abort_alone(reason)
        else:
            _abort_all(self.heartbeat, reason)

    def duplicate_comm(self) -> Comm:
        """Makes a communicator over all processes, with messages of its own; collective."""
        return self._create(lambda comm: comm.Dup())

    def across_nodes(self) -> Comm:
        """Makes a communicator of one process of each node, in the order of nodes; collective.

        It connects the processes with the local rank of this one.
        """
        return self._create(lambda comm: comm.Split(color=self.local_rank, key=self.node))

    def within_node(self) -> Comm:
        """Makes a communicator of the processes of this node; collective over all processes."""
        return self._create(lambda comm: comm.Split(color=self.node, key=self.local_rank))

    def _create(self, create: Callable[[Comm], Comm]) -> Comm:
        """Creates a communicator, or says what to do if MPI is missing or can create no more."""
        if self.comm is None:
            raise JdasoError(
                "this requires MPI: install mpi4py, and start with mpiexec or srun. "
                "Check both with: python -m jdaso doctor"
            )
        try:
            return create(self.comm)
        except Exception as error:
            raise JdasoError(
                f"MPI cannot create another communicator: {error}. Every exchange and mpi_center "
                "needs several: create them once and use them again, or call exchange.close() on "
                "all processes. An mpi_center keeps its own until the end."
            ) from None


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
    prepare_devices()
    with launchers.said_if_alone(os.environ):
        comm = _start_mpi()
    rank = comm.Get_rank() if comm is not None else 0
    gather = (lambda own: [own]) if comm is None else comm.allgather
    hosts, groups = zip(*gather((socket.gethostname(), _memory_group(comm))), strict=True)
    # Before JAX, because a process that finds no device must not leave the others waiting.
    heartbeat = None
    if comm is not None and len(hosts) > 1:
        heartbeat = _start_heartbeat(comm, hosts)
    if join_processes and comm is not None:
        per_node = processes_per_node or int(np.bincount(groups).max())
        _join_node(comm, _fill_nodes(np.array(groups), hosts, per_node)[rank], per_node)
    visible = tuple(jax.local_devices())
    own = visible[0].platform, len(visible), jax.process_count(), jax.process_index()
    processes = tuple(
        Process(*about, *found)
        for *about, found in zip(range(len(hosts)), hosts, groups, gather(own), strict=True)
    )
    per_node, placements = assign_nodes(processes, processes_per_node)
    if len(processes) == 1 and (warning := launchers.missing_srun(os.environ)):
        warnings.warn(f"jdaso: {warning}", RuntimeWarning, stacklevel=2)
    return Topology(rank, processes, placements, per_node, visible, comm, heartbeat)


def _start_mpi() -> Comm | None:
    """Starts MPI. Returns a duplicate of MPI.COMM_WORLD, or None for a process without MPI."""
    launch, mpich = launchers.detect_launch(os.environ), None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        mpich = importlib.metadata.version("mpich")
    os.environ.update(launchers.missing_variables(os.environ, mpich))
    try:
        import mpi4py

        mpi4py.rc.initialize = False  # some libraries die in MPI_Init under another's launcher
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if launch.processes > 1:
            raise JdasoError(
                f"{launch.launcher.name} started {launch.processes} processes, but mpi4py cannot "
                f"be imported on {socket.gethostname()}: {error}. Install it with: pip install "
                "mpi4py (where there is no MPI: pip install mpich mpi4py). Check it with: python "
                "-m jdaso doctor"
            ) from error
        return None
    if not MPI.Is_initialized():
        if launchers.cannot_start(launch, library(MPI), mpich):
            raise JdasoError(launchers.explain_single_process(launch, library(MPI)))
        level = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
        MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))
        if mpi4py.rc.finalize is not False:
            global _finalized_by
            _finalized_by = os.getpid()
    size = MPI.COMM_WORLD.Get_size()
    if size == 1 and launch.processes > 1:
        raise JdasoError(launchers.explain_single_process(launch, library(MPI)))
    if size > 1 and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise JdasoError(
            f"MPI was initialized with thread level {thread_level(MPI)} on {socket.gethostname()}, "
            "but exchanges in the background require MPI_THREAD_MULTIPLE. Leave "
            "mpi4py.rc.thread_level at 'multiple', and let only mpi4py initialize MPI. Check "
            "it with: python -m jdaso doctor"
        )
    # MPI_Finalize deletes the attributes of this communicator first.
    close = MPI.Comm.Create_keyval(delete_fn=lambda *_: run_exit_functions())
    MPI.COMM_SELF.Set_attr(close, None)
    return MPI.COMM_WORLD.Dup()


_finalized_by: int | None = None  # the process that finalizes MPI when it exits


@atexit.register  # now, so that it runs after the functions that the program registers later
def _finalize() -> None:
    if os.getpid() == _finalized_by:
        from mpi4py import MPI

        if not MPI.Is_finalized():
            MPI.Finalize()


def library(mpi: Any) -> str:
    """Returns name and version of the MPI library, on one line."""
    return " ".join(mpi.Get_library_version().strip("\x00").splitlines()[0].split())


def thread_level(mpi: Any) -> str:
    """Returns the thread level that MPI was initialized with."""
    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return next(x for x in levels if getattr(mpi, f"THREAD_{x}") == mpi.Query_thread())


def _memory_group(comm: Comm | None) -> int:
    """Returns the smallest rank among the processes that share memory; collective."""
    if comm is None:
        return 0
    from mpi4py import MPI

    on_host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    first = on_host.bcast(comm.Get_rank())
    on_host.Free()
    return first


def _start_heartbeat(comm: Comm, hosts: Sequence[str]) -> Heartbeat:
    """Starts the heartbeat. From now on all processes are aborted when one of them fails."""

    def describe(rank: int) -> str:
        return f"rank {rank} ({hosts[rank]})"

    own = describe(comm.Get_rank())
    try:
        heartbeat = start_heartbeat(comm, describe, abort)
    except Exception as error:  # the others wait for this one
        reason = f"{own} failed: its heartbeat cannot start: {type(error).__name__}: {error}"
        abort(reason, 1, all_abort=False)
        raise
    at_exit(heartbeat.close_at_exit)
    abort_on_exception(own, functools.partial(_abort_all, heartbeat))
    return heartbeat


def _abort_all(heartbeat: Heartbeat, reason: str) -> None:
    status = EXIT_NODE_LOST if heartbeat.silent_ranks() else 1
    abort(reason, status, all_abort=heartbeat.broadcast_abort(reason, status))


def _join_node(comm: Comm, placement: Placement, per_node: int) -> None:
    """Calls ``jax.distributed.initialize`` for the processes of this node; collective over all.

    The coordinator is the first process of the node. It listens at a socket of the host, because
    another program may use any port.
    """
    if per_node == 1 or jax.distributed.is_initialized():
        return
    local_rank = placement.local_rank
    # A launcher may show each process its own device only.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sees_all = visible is None or len(visible.split(",")) >= per_node
    within_node = comm.Split(color=placement.node, key=local_rank)
    address = f"unix-abstract:jdaso-{within_node.bcast(secrets.token_hex(8))}"
    within_node.Free()
    # JAX's preemption service would handle SIGTERM, which is up to jdaso.cluster.Preemption.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    proxy = os.environ.get(_PROXY)
    os.environ[_PROXY] = ""  # no proxy within the host
    jax.distributed.initialize(
        address,
        per_node,
        local_rank,
        local_device_ids=[local_rank] if sees_all else None,
        cluster_detection_method="deactivate",
        # jdaso's own heartbeat detects a death earlier than this timeout.
        heartbeat_timeout_seconds=int(LOST_SECONDS),
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        coordinator_bind_address=address,
    )
    del os.environ[_PROXY]
    if proxy is not None:
        os.environ[_PROXY] = proxy


def assign_nodes(
    processes: tuple[Process, ...], processes_per_node: int | None
) -> tuple[int, tuple[Placement, ...]]:
    """Returns the number of processes per node, and the placement of each process.

    Argument and errors are those of :func:`jdaso.discover_topology`. Messages name the hosts.
    """
    about = {
        name: np.array(values) for name, *values in zip(Process._fields, *processes, strict=True)
    }
    # A program of several hosts is an error, which the last check explains.
    on_a_host = np.bincount(about["memory_group"]).max()
    per_node = processes_per_node or int(min(about["program_size"].max(), on_a_host))
    placements = _fill_nodes(about["memory_group"], about["host"].tolist(), per_node)
    by_node = np.lexsort(np.array(placements).T[::-1])
    about = {name: values[by_node].reshape(-1, per_node) for name, values in about.items()}
    _check_devices(about)
    _check_programs(about, processes_per_node)
    return per_node, placements


def _fill_nodes(
    memory_groups: np.ndarray, hosts: Sequence[str], per_node: int
) -> tuple[Placement, ...]:
    """Places the processes of each host in nodes of ``per_node``, in the order of ranks.

    Raises JdasoError unless the number of processes on every host is a multiple of ``per_node``.
    """
    _, first, on_host = np.unique(memory_groups, return_index=True, return_inverse=True)
    counts = np.bincount(on_host)
    if (counts % per_node).any():
        kinds = [f"{counts[i]} on {hosts[first[i]]}" for i in _examples(counts)]
        raise JdasoError(
            f"nodes of {per_node} processes require a multiple of {per_node} processes on every "
            f"host, got {', '.join(kinds)}. Start the same number on every host, or pass "
            "processes_per_node=1 to make each process a node."
        )
    places = np.argsort(np.argsort(on_host, kind="stable"))
    nodes, local_ranks = (places // per_node).tolist(), (places % per_node).tolist()
    return tuple(map(Placement, nodes, local_ranks))


def _examples(values: np.ndarray) -> list[int]:
    """Returns the first index of each different row, in the order of indices."""
    return sorted(np.unique(values, axis=0, return_index=True)[1].tolist())


def _check_devices(about: dict[str, np.ndarray]) -> None:
    """Raises JdasoError unless all processes have the same kind and number of devices.

    ``about`` has an array [node, local rank] for each field of :class:`Process`.
    """
    ranks, hosts, platforms = (about[name].flat for name in ("rank", "host", "platform"))
    if len(kinds := _examples(about["platform"].reshape(-1))) > 1:
        raise JdasoError(
            "all nodes must have the same kind of device, got "
            + ", ".join(f"{platforms[i]} on {hosts[i]} (rank {ranks[i]})" for i in kinds)
            + ". JAX falls back to the CPU where a GPU or its driver fails: check that host, or "
            "set JAX_PLATFORMS=cpu for all processes."
        )
    counts, first_hosts = about["num_devices"], about["host"][:, 0]
    if (counts != counts[0, 0]).any():
        raise JdasoError(
            "nodes have unequal numbers of devices, where all must have the same: "
            + ", ".join(
                f"node {i} ({first_hosts[i]}) has {'+'.join(map(str, counts[i]))}"
                for i in _examples(counts)
            )
            + ". Make the same number visible on every node (CUDA_VISIBLE_DEVICES)."
        )


def _check_programs(about: dict[str, np.ndarray], processes_per_node: int | None) -> None:
    """Raises JdasoError unless each node is one JAX program, of one process or several."""
    sizes, indices = about["program_size"], about["program_index"]
    per_node, hosts = sizes.shape[1], about["host"]
    wrong = (sizes != per_node) | (indices != np.arange(per_node))
    if (sizes > 1).any() and wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        raise JdasoError(
            f"rank {about['rank'][place]} ({hosts[place]}) is process {indices[place]} of "
            f"{sizes[place]} of a JAX program, but process {place[1]} of {per_node} of its node. "
            "A JAX program must consist of the processes of one node: leave out "
            "jax.distributed.initialize, and call discover_topology(join_processes=True)."
        )
    _, groups, together = np.unique(about["memory_group"], return_index=True, return_counts=True)
    unclear = processes_per_node is None and about["platform"][0, 0] != "cpu"
    if (sizes == 1).all() and (per_node > 1 or (unclear and together.max() > 1)):
        shared = int(np.argmax(together))
        raise JdasoError(
            f"the {together[shared]} processes on {hosts.flat[groups[shared]]} are JAX programs of "
            "their own, but a node is one program. If several processes are meant to be one node, "
            "start one process per node, which uses all of its devices, or join them with "
            "discover_topology(join_processes=True), before anything uses JAX's devices. If each "
            "process is meant to be a node, with devices of its own, pass processes_per_node=1."
        )
    if per_node > 1 and (visible := about["num_devices"][0, 0]) > 1:
        raise JdasoError(
            f"the {per_node} processes of node 0 ({hosts[0, 0]}) have {visible} devices each, but "
            "joined processes must have one device each: start one process for each device, or one "
            "for each node."
        )
