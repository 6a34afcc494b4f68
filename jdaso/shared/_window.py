"""Parameters in memory that MPI processes of one host share."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jdaso._at_exit import at_exit
from jdaso._base import JdasoError, PyTree
from jdaso._checks import check_number, check_whole
from jdaso._leaves import outline
from jdaso.exchange._operations import check_alike
from jdaso.shared._locks import Locks
from jdaso.shared._memory import (
    Memory,
    add_to,
    copied,
    shapes,
    simulated_memory,
    size_of,
    views,
    write,
)
from jdaso.topology import Topology

_PAUSE_SECONDS = 1e-3


def shared_memory(
    topology: Topology, params: PyTree, num_servers: int | None = None, timeout: float = 600.0
) -> Memory:
    """Parameters in one window of ``MPI.Win.Allocate_shared``; collective over all processes.

    All processes must share memory: start them on one host. With ``num_servers`` only the first
    ones update it, and rank r is a slave of server ``r mod num_servers``: see
    :func:`server_group`.

    Nobody waits for a meeting or a lock in silence. ``meet`` names processes that have ended, or
    that have not come within ``timeout``; the lock of a process that died is free at once, and the
    next one to take it is told that the block is half written.

    Args:
        topology: from :func:`jdaso.discover_topology`.
        params: arrays, of the same shapes and dtypes on all processes; those of rank 0 are the
            first values.
        num_servers: how many processes update; None: all.
        timeout: seconds that a process may wait for another one, be it at a meeting or for a lock.

    Returns:
        A :class:`Memory`. With one process, that of :func:`simulated_memory`.

    Raises:
        ValueError: for a number of servers that does not divide that of processes, or a time-out
            that is not positive.
        JdasoError: if processes do not share memory, or their parameters differ.

    >>> import jax.numpy as jnp, jdaso
    >>> memory = shared_memory(jdaso.discover_topology(), {"w": jnp.ones(2)})
    >>> memory.process, memory.processes
    (0, 1)
    """
    check_number("timeout", timeout, above=True)
    servers = check_servers(num_servers, len(topology.processes))
    if len(topology.processes) == 1:
        return simulated_memory(params)[0]
    _check_one_host(topology)
    window = _Window(topology, params, servers, timeout)
    return Memory(
        topology.rank % servers,
        servers,
        writes=topology.rank < servers,
        members=len(topology.processes) // servers,
        params=shapes(params),
        read=window.read,
        add=window.add,
        meet=window.meet,
        compare=window.compare,
    )


def check_servers(num_servers: int | None, processes: int) -> int:
    """The number of servers; raises ValueError unless each gets as many slaves as the others."""
    if num_servers is None:
        return processes
    check_whole("num_servers", num_servers, 1)
    if processes % num_servers:
        raise ValueError(
            f"num_servers must divide the number of processes, {processes}, so that each server "
            f"has as many slaves as the others; got {num_servers}."
        )
    return num_servers


class _Window:
    """The memory itself: parameters, who is writing what, and who has come to which meeting."""

    def __init__(self, topology: Topology, params: PyTree, servers: int, timeout: float):
        from mpi4py import MPI

        self._comm = topology.comm.Dup()
        self._describe, self._rank = topology.describe, topology.rank
        self._params, self._timeout = shapes(params), timeout
        check_alike(self._comm.allgather(outline(params)), self._describe)
        processes, begin = self._comm.Get_size(), size_of(params)
        size = begin + 8 * (servers + processes)
        on_host = self._comm.Split_type(MPI.COMM_TYPE_SHARED, key=self._rank)
        self._window = MPI.Win.Allocate_shared(size if self._rank == 0 else 0, 1, comm=on_host)
        memory: Any = self._window.Shared_query(0)[0]
        buffer = np.frombuffer(memory, np.uint8)
        self._arrays = views(buffer, params)
        numbers = buffer[begin : begin + 8 * (servers + processes)].view(np.int64)
        holders, self._meetings = numbers[:servers], numbers[servers:]
        self._window.Lock_all(MPI.MODE_NOCHECK)  # an epoch for the whole training
        if self._rank == 0:
            write(self._arrays, params)
            numbers[:] = 0
        self._locks = Locks(self._open_file(), holders, self._rank, self._describe, timeout)
        at_exit(self._locks.leave)  # MPI's own end waits for the others
        self._window.Sync()
        self._comm.Barrier()
        self._window.Sync()

    def read(self) -> PyTree:
        self._window.Sync()
        return copied(self._arrays, self._params)

    def add(self, number: int, updates: Mapping[int, Any], locked: bool) -> None:
        # Outside of the lock: to wait for the device that computes them takes longest.
        given = {position: np.asarray(update) for position, update in updates.items()}
        if not locked:
            add_to(self._arrays, given)
            self._window.Sync()
            return
        with self._locks.hold(number):
            self._window.Sync()
            add_to(self._arrays, given)
            self._window.Sync()

    def meet(self) -> None:
        own = int(self._meetings[self._rank]) + 1
        deadline = time.monotonic() + self._timeout
        self._meetings[self._rank] = own
        self._window.Sync()
        while missing := self._missing(own):
            # In this order: one may have come and then ended.
            ended = {rank for rank in missing if not self._locks.is_alive(rank)}
            if ended := ended.intersection(self._missing(own)):
                raise JdasoError(f"{self._listed(ended)} ended, and {self._here()} waits for it.")
            if time.monotonic() > deadline:
                raise JdasoError(
                    f"{self._listed(missing)} did not come to where {self._here()} waits, within "
                    f"{self._timeout:g} s."
                )
            time.sleep(_PAUSE_SECONDS)

    def compare(self, lines: Sequence[str]) -> None:
        self.meet()
        check_alike(self._comm.allgather(list(lines)), self._describe)

    def _missing(self, meeting: int) -> list[int]:
        self._window.Sync()
        return [rank for rank, last in enumerate(self._meetings) if last < meeting]

    def _here(self) -> str:
        return self._describe(self._rank)

    def _listed(self, ranks) -> str:
        return ", ".join(self._describe(rank) for rank in sorted(ranks))

    def _open_file(self) -> int:
        """A file without a name, open in all processes, that lives as long as one of them."""
        folder = "/dev/shm" if Path("/dev/shm").is_dir() else None  # locks are quick there
        path = None
        if self._rank == 0:
            created, path = tempfile.mkstemp(prefix="jdaso-locks-", dir=folder)
            os.close(created)
        path = self._comm.bcast(path)
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise JdasoError(
                f"{self._here()} cannot open {path}, where processes of this host take locks: "
                f"{error.strerror}. Give all of them the same TMPDIR."
            ) from error
        self._comm.Barrier()
        if self._rank == 0:
            os.unlink(path)
        return descriptor


def _check_one_host(topology: Topology) -> None:
    apart = [p for p in topology.processes if p.shared_with != topology.processes[0].shared_with]
    if apart:
        raise JdasoError(
            f"these processes do not share memory: {topology.describe(0)} and "
            f"{topology.describe(apart[0].rank)}, and {len(apart) - 1} more. Start all processes "
            "on one host; between hosts use jdaso.easgd, jdaso.daso or another exchange."
        )
