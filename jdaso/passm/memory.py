"""The parameters that processes share: the interface, its simulation, and an MPI window."""

import collections
import contextlib
import fcntl
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.cluster.ending import at_exit
from jdaso.cluster.topology import Topology
from jdaso.core.tree import outline
from jdaso.core.types import JdasoError, PyTree
from jdaso.core.validation import check_number, check_whole
from jdaso.exchange.transport.collectives import check_alike

# Every array starts at a multiple of a cache line. No number lies across two lines, so the
# processor reads and writes each number in one piece.
_CACHE_LINE_BYTES = 64
NO_HOLDER = 0
_IN_MEMORY = "/dev/shm"  # where Linux and MPI keep shared memory

Updates = Mapping[int, Mapping[int, Any]]


class Memory(NamedTuple):
    """Parameters that several processes read and write while they train.

    Attributes:
        process: Index of this process among those that update. For a slave, that of its server.
        processes: Number of processes that update, and number of locks; c in the paper.
        writes: False for a slave, whose server writes.
        members: Number of processes of a server with its slaves. 1 without slaves.
        params: Structure, shapes and dtypes of the parameters.
        read: ``() -> params``, a copy as NumPy arrays, without a lock. It may mix versions, but
            each number in it was written by one of the processes.
        add: ``(updates, locked) -> None``, one write. ``updates[c][i]`` is added to leaf i, for
            which process c is responsible. With ``locked``, the lock of each process's leaves is
            held while they change, one lock at a time.
        barrier: ``() -> None`` waits for all processes. What they read afterward contains
            everything that was written before.
        compare: ``(lines) -> None`` raises on all processes if the text differs between them.
    """

    process: int
    processes: int
    writes: bool
    members: int
    params: PyTree
    read: Callable[[], PyTree]
    add: Callable[[Updates, bool], None]
    barrier: Callable[[], None]
    compare: Callable[[Sequence[str]], None]


def _shapes(params: PyTree) -> PyTree:
    """The parameters with a ``jax.ShapeDtypeStruct`` in place of each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


def _add_updates(arrays: Sequence[np.ndarray], updates: Mapping[int, Any]) -> None:
    for position, update in updates.items():
        array = arrays[position]
        np.add(array, np.asarray(update, array.dtype), out=array)  # stores each number in one piece


def simulated_memory(
    params: PyTree, processes: int = 1, max_delay: int = 0, seed: int = 0
) -> list[Memory]:
    """The memories of several processes that one process simulates, in any order.

    A simulated step reads, computes and writes before the next one begins, so without delays the
    training is sequential. With ``max_delay``, each number of a read has a delay of its own and
    comes from the version that the memory held that many writes ago:

        (x_1^{k - d_1}, ..., x_n^{k - d_n}),   0 <= d_j <= delta   (passm Assumption 2.1)

    The paper bounds the delays and leaves their distribution open. Here they are independent and
    uniform, and nothing is older than the first values or the last barrier. A step's write counts
    as one version even if it changes all leaves.

    Args:
        params: Arrays, the first values.
        processes: Number of simulated processes, at least 1.
        max_delay: The largest delay in writes of all processes; delta in the paper.
        seed: Seed of the delays. The same steps in the same order read the same numbers again.

    Returns:
        One :class:`Memory` for each process, all of the same parameters.

    Raises:
        ValueError: For numbers out of range.

    >>> import numpy as np
    >>> first, second = simulated_memory({"w": np.zeros(2, "f4")}, processes=2)
    >>> first.add({0: {0: np.array([1.0, 2.0])}}, True)
    >>> second.read()
    {'w': array([1., 2.], dtype=float32)}
    """
    check_whole("processes", processes, 1)
    check_whole("max_delay", max_delay, 0)
    check_whole("seed", seed, 0, bits=63)
    structure, rng = jax.tree.structure(params), np.random.default_rng(seed)
    first = [np.array(leaf, jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)]
    versions = collections.deque([first], max_delay + 1)  # the newest first; arrays never change

    def mixed(of_leaf: Sequence[np.ndarray]) -> np.ndarray:
        newest = of_leaf[0].copy()
        if len(of_leaf) > 1:
            drawn = rng.integers(max_delay, size=newest.shape, endpoint=True)
            delays = np.minimum(drawn, len(of_leaf) - 1)
            for delay, version in enumerate(of_leaf):
                np.copyto(newest, version, where=delays == delay)
        return newest

    def read() -> PyTree:
        return jax.tree.unflatten(structure, map(mixed, zip(*versions, strict=True)))

    def add(updates: Updates, locked: bool) -> None:
        given = {i: update for of_process in updates.values() for i, update in of_process.items()}
        newest = [np.array(x) if i in given else x for i, x in enumerate(versions[0])]
        _add_updates(newest, given)
        versions.appendleft(newest)

    def barrier() -> None:
        while len(versions) > 1:
            versions.pop()

    memory = Memory(0, processes, True, 1, _shapes(params), read, add, barrier, lambda lines: None)
    return [memory._replace(process=process) for process in range(processes)]


def settled(memory: Memory) -> PyTree:
    """The parameters after the steps of all processes, for evaluation or to save; collective.

    A barrier before and one after the read ensure that all processes get the same parameters, a
    copy in NumPy arrays.

    >>> import numpy as np
    >>> settled(simulated_memory({"w": np.ones(2, "f4")})[0])
    {'w': array([1., 1.], dtype=float32)}
    """
    memory.barrier()
    params = memory.read()
    memory.barrier()
    return params


def shared_memory(
    topology: Topology, params: PyTree, num_servers: int | None = None, timeout: float = 600.0
) -> Memory:
    """Parameters in one window of ``MPI.Win.Allocate_shared``; collective over all processes.

    All processes must run on one host. With ``num_servers``, only the first ranks update, and rank
    r is a slave of server ``r mod num_servers``, see :func:`server_group`. The barrier of the
    memory raises an error that names the processes that have ended, or that did not call it within
    ``timeout``. Who acquires the lock of a process that died raises an error, because its leaves
    may be half written.

    Args:
        topology: From :func:`jdaso.discover_topology`.
        params: Arrays, alike on all processes. Those of rank 0 are the first values.
        num_servers: Number of processes that update, a divisor of their number. None: all.
        timeout: Seconds that a process waits for another one, at a barrier or for a lock.

    Returns:
        A :class:`Memory`. With one process, that of :func:`simulated_memory`.

    Raises:
        ValueError: For a ``num_servers`` or a ``timeout`` out of range.
        JdasoError: If processes do not share memory, if ``/dev/shm`` has no place for the
            parameters, as in a container, or if the processes' parameters differ.

    >>> import jax.numpy as jnp, jdaso
    >>> memory = shared_memory(jdaso.discover_topology(), {"w": jnp.ones(2)})
    >>> memory.process, memory.processes
    (0, 1)
    """
    check_number("timeout", timeout, above=True)
    processes = topology.processes
    servers = len(processes) if num_servers is None else num_servers
    _check_servers(servers, len(processes))
    if len(processes) == 1:
        return simulated_memory(params)[0]
    if apart := [p for p in processes if p.memory_group != processes[0].memory_group]:
        raise JdasoError(
            f"all processes must share memory, got {topology.describe(0)} and "
            f"{topology.describe(apart[0].rank)}, and {len(apart) - 1} more on other hosts. Start "
            "all processes on one host, or use jdaso.easgd, jdaso.daso or another exchange."
        )
    window = _SharedWindow(topology, params, servers, timeout)
    return Memory(
        topology.rank % servers,
        servers,
        writes=topology.rank < servers,
        members=len(processes) // servers,
        params=_shapes(params),
        read=window.read,
        add=window.add,
        barrier=window.barrier,
        compare=window.compare,
    )


def server_group(topology: Topology, num_servers: int) -> Topology:
    """The group of processes that this one averages gradients with (passm Sec. 4).

    "Each PS can have multiple slaves": rank r belongs to server ``r mod num_servers``, and is the
    server itself if r is below ``num_servers``. Collective over all processes.

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
    _check_servers(num_servers, len(topology.processes))
    if topology.comm is None:
        return topology
    server = topology.rank % num_servers
    ranks = range(server, len(topology.processes), num_servers)
    return topology.restricted_to(ranks, topology.comm.Split(server, topology.rank))


def _check_servers(num_servers: int, processes: int) -> None:
    check_whole("num_servers", num_servers, 1)
    if processes % num_servers:
        raise ValueError(
            f"num_servers must divide the number of processes, {processes}, so that all servers "
            f"have equal numbers of slaves, got {num_servers}."
        )


def _lack_of_space(size: int) -> str:
    """The error if the folder of shared memory has no place for ``size`` bytes, otherwise ""."""
    try:
        free = shutil.disk_usage(_IN_MEMORY).free
    except OSError:  # another system
        return ""
    if size <= free:
        return ""
    return (
        f"shares parameters of {size / 1e6:.1f} MB, but {_IN_MEMORY} has only {free / 1e6:.1f} MB "
        "free. Give the container more shared memory (docker run --shm-size=8g; in Kubernetes a "
        f"volume emptyDir with medium: Memory, mounted at {_IN_MEMORY}), remove what ended jobs "
        f"have left in {_IN_MEMORY}, or train with jdaso.easgd, which shares no memory."
    )


class _SharedWindow:
    """An MPI window with the parameters, the holders of the locks, and counts of barriers."""

    def __init__(self, topology: Topology, params: PyTree, servers: int, timeout: float):
        from mpi4py import MPI

        self._comm = topology.duplicate_comm()
        self._describe, self._rank = topology.describe, topology.rank
        self._structure, self._timeout = jax.tree.structure(params), timeout
        check_alike(self._comm.allgather(outline(params)), self._describe)
        leaves = jax.tree.leaves(_shapes(params))
        sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
        whole_lines = (-(-size // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES for size in sizes)
        starts = [*itertools.accumulate(whole_lines, initial=0)]
        total = starts[-1] + 8 * (servers + self._comm.Get_size())
        # The first write to a page that does not fit would end this process with a bus error.
        if problem := self._comm.bcast(_lack_of_space(total) if self._rank == 0 else "", 0):
            raise JdasoError(f"{self._describe(0)} {problem}")
        on_host: Any = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self._rank)
        self._window = MPI.Win.Allocate_shared(total if self._rank == 0 else 0, 1, comm=on_host)
        shared: Any = self._window.Shared_query(0)[0]
        buffer = np.frombuffer(shared, np.uint8)
        self._arrays = [
            buffer[start : start + size].view(leaf.dtype).reshape(leaf.shape)
            for leaf, start, size in zip(leaves, starts, sizes, strict=False)
        ]
        numbers = buffer[starts[-1] : total].view(np.int64)
        holders, self._barriers = numbers[:servers], numbers[servers:]
        self._window.Lock_all(MPI.MODE_NOCHECK)  # an epoch for the whole training
        if self._rank == 0:
            for array, leaf in zip(self._arrays, jax.tree.leaves(params), strict=True):
                array[...] = leaf
            numbers[:] = 0
        self._locks = Locks(self._open_file(), holders, self._rank, self._describe, timeout)
        at_exit(self._locks.announce_exit)  # MPI_Finalize would wait for the others
        self._window.Sync()
        self._comm.Barrier()
        self._window.Sync()

    def read(self) -> PyTree:
        self._window.Sync()
        # JAX may use NumPy memory without copying it. It must not use memory that others change.
        return jax.tree.unflatten(self._structure, [array.copy() for array in self._arrays])

    def add(self, updates: Updates, locked: bool) -> None:
        for process, of_process in updates.items():
            # Waiting for the device takes longest, so it is done before the lock is acquired.
            given = {position: np.asarray(update) for position, update in of_process.items()}
            with self._locks.acquire(process) if locked else contextlib.nullcontext():
                self._window.Sync()
                _add_updates(self._arrays, given)
                self._window.Sync()

    def barrier(self) -> None:
        own = int(self._barriers[self._rank]) + 1
        deadline = time.monotonic() + self._timeout
        self._barriers[self._rank] = own

        def missing() -> set[int]:
            self._window.Sync()
            return {rank for rank, reached in enumerate(self._barriers) if reached < own}

        def names(ranks: set[int]) -> str:
            return ", ".join(map(self._describe, sorted(ranks)))

        while late := missing():
            # In this order, because a process may have reached the barrier and then ended.
            ended = {rank for rank in late if not self._locks.is_alive(rank)}
            problem = ""
            if ended := ended & missing():
                problem = f"waits at a barrier for {names(ended)}, which ended without it"
            elif time.monotonic() > deadline:
                problem = f"waited {self._timeout:g} s at a barrier for {names(late)}"
            if problem:
                raise JdasoError(
                    f"{self._describe(self._rank)} {problem}. All processes must call barrier and "
                    "settled equally often."
                )
            time.sleep(1e-3)

    def compare(self, lines: Sequence[str]) -> None:
        self.barrier()
        check_alike(self._comm.allgather(list(lines)), self._describe)

    def _open_file(self) -> int:
        """Opens a file in all processes, and unlinks it."""
        folder = _IN_MEMORY if Path(_IN_MEMORY).is_dir() else None  # locks are fast in memory
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


class Locks:
    """Locks on the bytes of a file that each process has opened by itself.

    The kernel releases the lock of a process that dies. ``holders`` (int64, in shared memory) keeps
    rank + 1 of each lock's holder, so the next process to acquire the lock knows that a write was
    not completed. Each process also locks a byte of its own for as long as it lives.
    """

    def __init__(self, descriptor: int, holders: np.ndarray, rank: int, describe, timeout: float):
        self._descriptor, self._holders, self._rank = descriptor, holders, rank
        self._describe, self._timeout = describe, timeout
        self._try_lock(self._liveness_byte(rank))

    @contextlib.contextmanager
    def acquire(self, number: int) -> Iterator[None]:
        """Holds a lock; JdasoError after the timeout, or if the last holder did not finish."""
        deadline = time.monotonic() + self._timeout
        while not self._try_lock(number):
            if time.monotonic() > deadline:
                holder = int(self._holders[number])
                who = "another process" if holder == NO_HOLDER else self._describe(holder - 1)
                raise JdasoError(
                    f"{self._describe(self._rank)} has waited {self._timeout:g} s for the lock of "
                    f"the leaves of process {number}: {who} holds it. Check whether that process "
                    "is stopped."
                )
            time.sleep(5e-5)
        try:
            if (holder := int(self._holders[number])) != NO_HOLDER:
                raise JdasoError(
                    f"{self._describe(holder - 1)} ended while it wrote the leaves of process "
                    f"{number} to the shared memory, which are incomplete now. Restart from the "
                    "last checkpoint."
                )
            self._holders[number] = self._rank + 1
            yield
            self._holders[number] = NO_HOLDER  # not after an exception
        finally:
            self._unlock(number)

    def announce_exit(self) -> None:
        self._unlock(self._liveness_byte(self._rank))

    def is_alive(self, rank: int) -> bool:
        """Whether another process has neither ended nor announced its exit."""
        byte = self._liveness_byte(rank)
        if free := self._try_lock(byte):
            self._unlock(byte)
        return not free

    def _liveness_byte(self, rank: int) -> int:
        return len(self._holders) + rank

    def _try_lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _unlock(self, byte: int) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
