"""Parameters in memory that the MPI processes of one host share, and groups of processes."""

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jdaso.cluster.abort import at_exit
from jdaso.cluster.topology import Topology
from jdaso.core.tree import outline
from jdaso.core.types import JdasoError, PyTree
from jdaso.core.validation import check_number, check_whole
from jdaso.exchange.transport.collectives import check_alike
from jdaso.passm import memory
from jdaso.passm.file_locks import Locks

_PAUSE_SECONDS = 1e-3
# Every array starts at a multiple of a cache line. No number lies across two lines, so the
# processor reads and writes each number in one piece.
_CACHE_LINE_BYTES = 64


def shared_memory(
    topology: Topology, params: PyTree, num_servers: int | None = None, timeout: float = 600.0
) -> memory.Memory:
    """Parameters in one window of ``MPI.Win.Allocate_shared``; collective over all processes.

    All processes must run on one host. With ``num_servers``, only the first ranks update, and rank
    r is a slave of server ``r mod num_servers``, see :func:`server_group`.

    ``barrier`` raises an error that names the processes that have ended, or that did not call it
    within ``timeout``. A process that acquires the lock of a process that died raises an error,
    because its leaves may be half written.

    Args:
        topology: From :func:`jdaso.discover_topology`.
        params: Arrays of the same shapes and dtypes on all processes. Those of rank 0 are the
            first values.
        num_servers: Number of processes that update. None: all.
        timeout: Seconds that a process waits for another one, at a barrier or for a lock.

    Returns:
        A :class:`Memory`. With one process, that of :func:`simulated_memory`.

    Raises:
        ValueError: If ``num_servers`` does not divide the number of processes, or ``timeout`` is
            not positive.
        JdasoError: If processes do not share memory, or their parameters differ.

    >>> import jax.numpy as jnp, jdaso
    >>> memory = shared_memory(jdaso.discover_topology(), {"w": jnp.ones(2)})
    >>> memory.process, memory.processes
    (0, 1)
    """
    check_number("timeout", timeout, above=True)
    servers = _check_num_servers(num_servers, len(topology.processes))
    if len(topology.processes) == 1:
        return memory.simulated_memory(params)[0]
    _check_one_host(topology)
    window = _SharedWindow(topology, params, servers, timeout)
    return memory.Memory(
        topology.rank % servers,
        servers,
        writes=topology.rank < servers,
        members=len(topology.processes) // servers,
        params=memory.shapes(params),
        read=window.read,
        add=window.add,
        barrier=window.barrier,
        compare=window.compare,
    )


def server_group(topology: Topology, num_servers: int) -> Topology:
    """The group of processes that this one averages gradients with (passm Sec. 4).

    "A single GPU hosts multiple concurrent processes working as asynchronous PSs. Each PS can have
    multiple slaves": rank r belongs to server ``r mod num_servers``, and is the server itself if
    r is below ``num_servers``. Collective over all processes.

    Args:
        topology: From :func:`jdaso.discover_topology`.
        num_servers: Number of servers. It divides the number of processes.

    Returns:
        A topology of the server, which is node 0, and its slaves. Pass an exchange over it as
        ``group`` to :func:`assm`, :func:`passm` and :func:`passm_plus`.

    Raises:
        ValueError: If ``num_servers`` does not divide the number of processes.

    >>> import jdaso
    >>> group = server_group(jdaso.discover_topology(), num_servers=1)
    >>> jdaso.mpi_exchange(group).num_nodes
    1
    """
    _check_num_servers(num_servers, len(topology.processes))
    if topology.comm is None:
        return topology
    server = topology.rank % num_servers
    ranks = range(server, len(topology.processes), num_servers)
    return topology.restricted_to(ranks, topology.comm.Split(server, topology.rank))


def _check_num_servers(num_servers: int | None, processes: int) -> int:
    """The number of servers; raises ValueError unless it divides the number of processes."""
    if num_servers is None:
        return processes
    check_whole("num_servers", num_servers, 1)
    if processes % num_servers:
        raise ValueError(
            f"num_servers must divide the number of processes, {processes}, so that all servers "
            f"have equal numbers of slaves, got {num_servers}."
        )
    return num_servers


class _SharedWindow:
    """An MPI window with the parameters, the holders of the locks, and counts of barriers."""

    def __init__(self, topology: Topology, params: PyTree, servers: int, timeout: float):
        from mpi4py import MPI

        self._comm = topology.duplicate_comm()
        self._describe, self._rank = topology.describe, topology.rank
        self._params, self._timeout = memory.shapes(params), timeout
        check_alike(self._comm.allgather(outline(params)), self._describe)
        processes, begin = self._comm.Get_size(), _num_bytes(params)
        size = begin + 8 * (servers + processes)
        on_host: Any = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self._rank)
        self._window = MPI.Win.Allocate_shared(size if self._rank == 0 else 0, 1, comm=on_host)
        shared: Any = self._window.Shared_query(0)[0]
        buffer = np.frombuffer(shared, np.uint8)
        self._arrays = _leaf_views(buffer, params)
        numbers = buffer[begin:size].view(np.int64)
        holders, self._barriers = numbers[:servers], numbers[servers:]
        self._window.Lock_all(MPI.MODE_NOCHECK)  # an epoch for the whole training
        if self._rank == 0:
            _write_leaves(self._arrays, params)
            numbers[:] = 0
        self._locks = Locks(self._open_file(), holders, self._rank, self._describe, timeout)
        at_exit(self._locks.announce_exit)  # MPI_Finalize would wait for the others
        self._window.Sync()
        self._comm.Barrier()
        self._window.Sync()

    def read(self) -> PyTree:
        self._window.Sync()
        return _copy_tree(self._arrays, self._params)

    def add(self, updates: memory.Updates, locked: bool) -> None:
        for process, of_process in updates.items():
            # Waiting for the device takes longest, so it is done before the lock is acquired.
            given = {position: np.asarray(update) for position, update in of_process.items()}
            with self._locks.acquire(process) if locked else contextlib.nullcontext():
                self._window.Sync()
                memory.add_updates(self._arrays, given)
                self._window.Sync()

    def barrier(self) -> None:
        own = int(self._barriers[self._rank]) + 1
        deadline = time.monotonic() + self._timeout
        self._barriers[self._rank] = own
        self._window.Sync()
        while missing := self._missing(own):
            # In this order, because a process may have reached the barrier and then ended.
            ended = {rank for rank in missing if not self._locks.is_alive(rank)}
            problem = ""
            if ended := ended.intersection(self._missing(own)):
                problem = f"waits at a barrier for {self._names(*ended)}, which ended without it"
            elif time.monotonic() > deadline:
                problem = f"waited {self._timeout:g} s at a barrier for {self._names(*missing)}"
            if problem:
                raise JdasoError(
                    f"{self._describe(self._rank)} {problem}. All processes must call barrier and "
                    "settled equally often."
                )
            time.sleep(_PAUSE_SECONDS)

    def compare(self, lines: Sequence[str]) -> None:
        self.barrier()
        check_alike(self._comm.allgather(list(lines)), self._describe)

    def _missing(self, count: int) -> list[int]:
        """The ranks that have not reached this barrier."""
        self._window.Sync()
        return [rank for rank, reached in enumerate(self._barriers) if reached < count]

    def _names(self, *ranks: int) -> str:
        return ", ".join(map(self._describe, sorted(ranks)))

    def _open_file(self) -> int:
        """Opens the file of the locks in all processes and unlinks it."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None  # locks are fast in memory
        path = None
        if self._rank == 0:
            created, path = tempfile.mkstemp(prefix="jdaso-locks-", dir=folder)
            os.close(created)
        path = self._comm.bcast(path, 0)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise JdasoError(
                f"{self._describe(self._rank)} cannot open {path}, the lock file of this host: "
                f"{error.strerror}. Set the same TMPDIR for all processes."
            ) from error
        self._comm.Barrier()
        if self._rank == 0:
            os.unlink(path)
        return descriptor


def _check_one_host(topology: Topology) -> None:
    apart = [p for p in topology.processes if p.memory_group != topology.processes[0].memory_group]
    if apart:
        raise JdasoError(
            f"all processes must share memory, got {topology.describe(0)} and "
            f"{topology.describe(apart[0].rank)}, and {len(apart) - 1} more on other hosts. Start "
            "all processes on one host, or use jdaso.easgd, jdaso.daso or another exchange."
        )


def _num_bytes(params: PyTree) -> int:
    """Size of the buffer for :func:`_leaf_views`."""
    return sum(
        _padded_size(x.size * x.dtype.itemsize) for x in jax.tree.leaves(memory.shapes(params))
    )


def _leaf_views(buffer: np.ndarray, params: PyTree) -> list[np.ndarray]:
    """Views of a uint8 buffer with the shapes and dtypes of the leaves of a tree."""
    arrays, offset = [], 0
    for leaf in jax.tree.leaves(memory.shapes(params)):
        size = leaf.size * leaf.dtype.itemsize
        arrays.append(buffer[offset : offset + size].view(leaf.dtype).reshape(leaf.shape))
        offset += _padded_size(size)
    return arrays


def _write_leaves(arrays: Sequence[np.ndarray], params: PyTree) -> None:
    """Copies the leaves of a tree to arrays of the same shapes."""
    for array, leaf in zip(arrays, jax.tree.leaves(params), strict=True):
        array[...] = leaf


def _copy_tree(arrays: Sequence[np.ndarray], params: PyTree) -> PyTree:
    """A tree like params of copies of the arrays.

    JAX may use NumPy memory without copying it. It must not use memory that others change.
    """
    return jax.tree.unflatten(jax.tree.structure(params), [array.copy() for array in arrays])


def _padded_size(size: int) -> int:
    return -(-size // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
