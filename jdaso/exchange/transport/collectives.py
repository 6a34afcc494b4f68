"""Collective operations on host memory, advanced by the progress thread.

Each operation yields the ranks of its communicator that it waits for.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from jdaso.core.mpi_types import Comm
from jdaso.core.types import JdasoError
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.transport.all_reduce import all_reduce, part, shards
from jdaso.exchange.transport.operation import Operation, WaitState, wait_for

_DIGEST_TAG, _OUTLINE_TAG, _FLAG_TAG, _FIRST_TAG = 0, 1, 2, 3
_BROADCAST_BYTES = 1 << 26


class AllReduceOptions(NamedTuple):
    """How the bytes of an exchange travel; see :func:`jdaso.mpi_exchange`."""

    pattern: str = "direct"
    senders: str = "one"
    chunk_bytes: int = 1 << 20


def sum_staged(
    comm: Comm, staging: StagingBuffers, options: AllReduceOptions, index: int = 0, parts: int = 1
) -> Operation:
    """Sums one part of a staging buffer over a communicator; returns the bytes sent."""
    sent = 0
    for vector, sums in staging.pairs:
        owned = part(shards(len(vector), comm.Get_size()), index, parts)
        elements = max(1, options.chunk_bytes // (vector.itemsize * math.prod(vector.shape[1:])))
        sent += yield from all_reduce(
            comm, vector, sums, owned, elements, _FIRST_TAG, options.pattern
        )
    return sent


def broadcast(comm: Comm, arrays: Sequence[np.ndarray], root: int) -> Operation:
    """Overwrites the arrays with those of rank ``root``."""
    requests = []
    for array in arrays:
        raw = array.reshape(-1).view(np.uint8)
        for start in range(0, len(raw), _BROADCAST_BYTES):
            requests.append(comm.Ibcast(raw[start : start + _BROADCAST_BYTES], root=root))
    before = None
    while requests := [request for request in requests if not request.Test()]:
        # The root does not know which receivers it waits for: its set of ranks is empty.
        ranks = frozenset({root} - {comm.Get_rank()})
        yield WaitState(ranks, len(requests) != before, tuple(requests))
        before = len(requests)


def any_true(comm: Comm, flag: bool) -> Operation:
    """Whether any member's flag is True."""
    flags = yield from gather(comm, np.array([flag]), _FLAG_TAG)
    return any(bool(other[0]) for other in flags)


def compare(comm: Comm, outline: Sequence[str], describe: Callable[[int], str]) -> Operation:
    """Raises on every member if the outlines of the members' trees, a line per leaf, differ.

    Whole outlines are sent only if their digests differ.
    """
    text = "\n".join(outline).encode()
    digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8).copy()
    digests = yield from gather(comm, digest, _DIGEST_TAG)
    if all(np.array_equal(digests[0], other) for other in digests):
        return
    lengths = yield from gather(comm, np.array([len(text)], np.int64), _OUTLINE_TAG)
    padded = text.ljust(max(int(length[0]) for length in lengths), b"\0")
    texts = yield from gather(comm, np.frombuffer(padded, np.uint8).copy(), _OUTLINE_TAG)
    check_alike([raw.tobytes().rstrip(b"\0").decode().split("\n") for raw in texts], describe)


def check_alike(outlines: Sequence[Sequence[str]], describe: Callable[[int], str]) -> None:
    """Raises JdasoError with rank and leaf if the outlines of the members' trees differ."""
    for rank, other in enumerate(outlines):
        for a, b in zip_longest(outlines[0], other, fillvalue="no such leaf"):
            if a != b:
                raise JdasoError(
                    f"the nodes' parameters differ: {describe(0)} has {a}, {describe(rank)} has "
                    f"{b}. Build the same model on every node."
                )


def gather(comm: Comm, own: np.ndarray, tag: int) -> Operation:
    """Returns the arrays of all members by rank. All have the same shape and dtype."""
    size, rank = comm.Get_size(), comm.Get_rank()
    arrays = [np.empty_like(own) for _ in range(size)]
    arrays[rank] = own
    peers = [(rank + i) % size for i in range(1, size)]
    receives = {p: comm.Irecv(arrays[p].view(np.uint8), source=p, tag=tag) for p in peers}
    sends = {p: comm.Isend(own.view(np.uint8), dest=p, tag=tag) for p in peers}
    yield from wait_for(receives)
    yield from wait_for(sends)
    return arrays
