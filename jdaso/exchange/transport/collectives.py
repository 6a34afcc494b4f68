"""Collective operations on host memory, advanced by the progress thread."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from jdaso.cluster.mpi_types import Comm, MpiRequest
from jdaso.core.block_format import format_of
from jdaso.core.types import JdasoError
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.transport.all_reduce import (
    all_reduce,
    segments,
    shards,
    subtract_product,
    widen_sums,
)
from jdaso.exchange.transport.operation import Operation, wait_for

_BROADCAST_BYTES = 1 << 26
_OUTLINE = np.dtype([("digest", "V32"), ("length", "<i8")])


class _Segment(NamedTuple):
    """Consecutive elements of a staging buffer, see ``all_reduce``."""

    vector: np.ndarray
    sums: np.ndarray
    arrived: np.ndarray


def _segments(staging: StagingBuffers) -> list[_Segment]:
    return [
        _Segment(vector[place], total := sums[place], total if wide is sums else wide[place])
        for (vector, sums), wide in zip(staging.pairs, staging.arrived, strict=True)
        for place in segments(vector)
    ]


def sum_staged(comm: Comm, staging: StagingBuffers, chunk_bytes: int) -> Operation:
    """Sums a staging buffer over a communicator; returns the bytes sent.

    The sums are rounded to the wire dtype until ``widen_staged`` has converted them.
    """
    sent = 0
    for segment in _segments(staging):
        sent += yield from all_reduce(comm, *segment, chunk_bytes)
    return sent


def widen_staged(staging: StagingBuffers, node: int, nodes: int) -> Operation:
    """Converts the sums to their accumulation dtype."""
    for vector, sums, arrived in _segments(staging):
        if arrived is not sums:
            own = shards(len(vector), nodes).of(node)
            kept = own if format_of(vector.dtype) else slice(0, 0)
            yield from widen_sums(arrived, sums, nodes, kept)


def subtract_own(staging: StagingBuffers, members: float) -> Operation:
    """Subtracts what this process has sent, times the number of members, from the sums."""
    for vector, sums, _ in _segments(staging):
        yield from subtract_product(sums, vector, members)


def broadcast(comm: Comm, arrays: Sequence[np.ndarray], root: int) -> Operation:
    """Overwrites the arrays with those of rank ``root``."""
    yield from wait_for(
        comm.Ibcast(piece, root=root) for array in arrays for piece in _countable(array)
    )


def pass_on(comm: Comm, staging: StagingBuffers, root: int, others: Collection[int]) -> Operation:
    """Sends all sums from rank ``root`` to others."""
    requests: list[MpiRequest] = []
    for _, sums in staging.pairs:
        for piece in _countable(sums):
            if root == comm.Get_rank():
                requests += [comm.Isend(piece, dest=other, tag=0) for other in others]
            else:
                requests.append(comm.Irecv(piece, source=root, tag=0))
    yield from wait_for(requests)


def any_true(comm: Comm, flag: bool) -> Operation:
    """Whether any member's flag is True."""
    flags = yield from gather(comm, np.array([flag]))
    return bool(flags.any())


def compare(comm: Comm, outline: Sequence[str], describe: Callable[[int], str]) -> Operation:
    """Raises on every member if the outlines of the members' trees, a line per leaf, differ."""
    if (pair := (yield from different(comm, outline))) is not None:
        check_alike(list(pair.values()), lambda index: describe(list(pair)[index]))


def different(comm: Comm, lines: Sequence[str]) -> Operation:
    """The lines of the first member, and of the first other one whose lines differ, by rank.

    None if all members have the same lines. Then only digests are sent.
    """
    text = "\n".join(lines).encode()
    own = np.array([(hashlib.sha256(text).digest(), len(text))], _OUTLINE)
    members = yield from gather(comm, own)
    others = np.flatnonzero(members["digest"] != members["digest"][0])
    if not others.size:
        return None
    texts = {rank: np.zeros(members["length"][rank], np.uint8) for rank in (0, int(others[0]))}
    for rank, buffer in texts.items():
        if rank == comm.Get_rank():
            buffer[:] = np.frombuffer(text, np.uint8)
        yield from broadcast(comm, [buffer], rank)
    return {rank: buffer.tobytes().decode().split("\n") for rank, buffer in texts.items()}


def check_alike(outlines: Sequence[Sequence[str]], describe: Callable[[int], str]) -> None:
    """Raises JdasoError with rank and leaf if the outlines of the members' trees differ."""
    for rank, other in enumerate(outlines):
        for a, b in zip_longest(outlines[0], other, fillvalue="no such leaf"):
            if a != b:
                raise JdasoError(
                    f"the nodes' parameters differ: {describe(0)} has {a}, {describe(rank)} has "
                    f"{b}. Build the same model on every node."
                )


def gather(comm: Comm, own: np.ndarray) -> Operation:
    """Returns an array with the element of each member by rank. ``own`` has one element."""
    arrays = np.empty(comm.Get_size(), own.dtype)
    yield from wait_for([comm.Iallgather(_bytes(own), _bytes(arrays))])
    return arrays


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def _countable(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields the bytes of an array in pieces. MPI can count the bytes of each piece."""
    raw = _bytes(array)
    for start in range(0, len(raw), _BROADCAST_BYTES):
        yield raw[start : start + _BROADCAST_BYTES]
