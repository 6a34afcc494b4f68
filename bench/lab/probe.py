"""The measurements of ``lab.py check``. The first node prints the result as a line of JSON.

- ``tcp``: round trips of a byte between two nodes, then many bytes in one direction, started by
  "each".
- ``all-reduce``: a sum over all nodes with mpi4py, an MPI job.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

TRIPS, MEGABYTES = 200, 20
ALL_REDUCE_BYTES = 40_000_000


def sent() -> int:
    """The bytes that this node has sent so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def connect() -> socket.socket:
    """A connection between the first two nodes."""
    first, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server((first, port)) as server:
            connection, _ = server.accept()
    else:
        for _ in range(100):
            try:
                connection = socket.create_connection((first, port), timeout=60)
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def tcp() -> None:
    if int(os.environ["RANK"]) > 1:
        return
    size = MEGABYTES * 1_000_000
    with connect() as connection:
        if os.environ["RANK"] == "1":
            for _ in range(TRIPS):
                connection.sendall(connection.recv(1))
            connection.recv(1)
            connection.sendall(bytes(size))
            return
        trips = []
        for _ in range(TRIPS):
            start = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - start)
        start = time.perf_counter()
        connection.sendall(b"!")
        received = 0
        while received < size:
            received += len(connection.recv(1 << 20))
        seconds = time.perf_counter() - start
    print(json.dumps({"round_trips": trips, "bytes": size, "seconds": seconds}))


def all_reduce() -> None:
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    ours = np.full(ALL_REDUCE_BYTES // 4, comm.rank + 1, np.float32)
    total = np.empty_like(ours)
    comm.Allreduce(ours, total)  # opens connections and uses the memory for the first time
    seconds = []
    for _ in range(3):
        comm.Barrier()
        before, start = sent(), time.perf_counter()
        comm.Allreduce(ours, total)
        seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
        bytes_sent = sent() - before
    assert (total == comm.size * (comm.size + 1) / 2).all()
    if comm.rank == 0:
        mpi = " ".join(MPI.Get_library_version().split()[:3])
        result = {"bytes": ALL_REDUCE_BYTES, "seconds": seconds, "sent": bytes_sent, "mpi": mpi}
        print(json.dumps(result))


if __name__ == "__main__":
    {"tcp": tcp, "all-reduce": all_reduce}[sys.argv[1]]()
