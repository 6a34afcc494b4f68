"""Records of fixed size in which all processes tell each other about themselves at the start."""

from typing import Any

import numpy as np

from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.placement import Process

# Linux allows host names of 64 bytes.
HOST = np.dtype([("host", "S64"), ("memory_group", "<i4")])
DEVICES = np.dtype([(name, "S16" if name == "platform" else "<i4") for name in Process._fields[3:]])


def gather(comm: Comm | None, dtype: np.dtype, *own: Any) -> np.ndarray:
    """The records of all processes, by rank. The own one has the fields ``own``."""
    record = np.array([own], dtype)
    if comm is None:
        return record
    records = np.empty(comm.Get_size(), dtype)
    comm.Allgather(record.view(np.uint8), records.view(np.uint8))
    return records


def memory_group(comm: Comm | None) -> int:
    """The smallest rank among the processes that share memory with this one; collective."""
    if comm is None:
        return 0
    from mpi4py import MPI

    on_host = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.Get_rank())
    first = on_host.bcast(comm.Get_rank())
    on_host.Free()
    return first


def processes_of(hosts: np.ndarray, devices: np.ndarray) -> tuple[Process, ...]:
    """All processes, by rank, from their records of both kinds."""
    names, groups = hosts["host"].tolist(), hosts["memory_group"].tolist()
    platforms, *counts = (devices[name].tolist() for name in Process._fields[3:])
    texts = map(bytes.decode, names), map(bytes.decode, platforms)
    return tuple(map(Process, range(len(names)), texts[0], groups, texts[1], *counts))
