"""The all-reduce of a vector on MPI's collectives.

Each member of a communicator owns a shard of the vector. The shards are summed in chunks, which
are a piece of every shard:

1. ``Ialltoallv`` sends each piece to its owner.
2. The owner adds the pieces in the order of members and rounds the sum to the wire dtype.
3. ``Iallgatherv`` sends the rounded sums to all members.

Each member sends 2 (P-1)/P of the vector's bytes, the least that an all-reduce can. The bits depend
neither on MPI nor on the chunks. MPI need not know the wire dtype.

All members must post the collectives of a communicator in the same order, whatever completes first.
With two chunks at a time, the order is: pieces 0, pieces 1, sums 0, pieces 2, sums 1, and so on.

A collective cannot be cancelled, so its buffers must live until it completes. The request refers to
them, and the suspended operation refers to the request. ``Progress`` keeps failed operations until
the process ends.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from jdaso.cluster.mpi_types import Comm, MpiRequest
from jdaso.core.block_format import format_of
from jdaso.core.wire import pack_sum, sum_divisor, sum_dtype
from jdaso.exchange.host.block_kernels import sum_blocks, unpack_blocks
from jdaso.exchange.transport.operation import Operation, WaitState, wait_for

# MPI counts bytes in 32 bits. Longer vectors are summed in segments.
_SEGMENT_BYTES = 1 << 30
# Messages are not cut further, because smaller ones cost more time than they save.
_LEAST_MESSAGE_BYTES = 1 << 16
# Chunks in progress at a time: enough to keep a fast network busy between two polls, unless they
# take more memory than this.
_MOST_CHUNKS, _LEAST_CHUNKS, _CHUNKS_BYTES = 4, 2, 1 << 25
# Numbers that are added or converted at a time, few enough that they stay in a cache.
_ADDED_AT_ONCE, _CONVERTED_AT_ONCE = 1 << 17, 1 << 20


class Pieces(NamedTuple):
    """Elements of a vector for each member: int64[P] starts and counts."""

    starts: np.ndarray
    counts: np.ndarray

    def of(self, member: int) -> slice:
        return slice(self.starts[member], self.starts[member] + self.counts[member])


def shards(length: int, size: int) -> Pieces:
    """The elements of a vector that each of ``size`` members sums.

    >>> shards(7, 2)
    Pieces(starts=array([0, 3]), counts=array([3, 4]))
    """
    bounds = length * np.arange(size + 1, dtype=np.int64) // size
    return Pieces(bounds[:-1], np.diff(bounds))


def segments(vector: np.ndarray) -> list[slice]:
    """Consecutive parts of a vector, short enough for MPI's counts. Each has its own shards."""
    rows = max(1, _SEGMENT_BYTES // row_bytes(vector))
    return [slice(lo, min(lo + rows, len(vector))) for lo in range(0, len(vector), rows)]


def row_bytes(vector: np.ndarray) -> int:
    """Bytes of an element of a vector, which is a row of bytes with int8 and float4."""
    return vector.itemsize * math.prod(vector.shape[1:])


def all_reduce(
    comm: Comm,
    vector: np.ndarray,
    sums: np.ndarray,
    arrived: np.ndarray,
    chunk_bytes: int,
) -> Operation:
    """Sums a vector over the members of a communicator; returns the bytes sent.

    Args:
        comm: Communicator that nothing else uses meanwhile.
        vector: This member's contribution in its wire dtype, one-dimensional or rows of bytes.
        sums: With int8 and float4, receives the sums of the own pieces, which are not rounded.
        arrived: Receives the rounded sums. It is ``sums`` if the wire dtype is that of sums.
        chunk_bytes: Largest size of one message in bytes.
    """
    size, rank, row = comm.Get_size(), comm.Get_rank(), row_bytes(vector)
    owned = shards(len(vector), size)
    message = max(chunk_bytes // max(1, size - 1), min(chunk_bytes, _LEAST_MESSAGE_BYTES))
    together = _CHUNKS_BYTES // (size * message)
    ahead = min(max(together, _LEAST_CHUNKS), _MOST_CHUNKS)
    rows = max(1, message // row)
    chunks = -(-int(owned.counts.max(initial=0)) // rows)

    scattered: deque[tuple[Pieces, np.ndarray, MpiRequest]] = deque()
    gathered: deque[MpiRequest] = deque()
    for step in range(chunks + ahead):
        if ahead <= step:
            pieces, terms, request = scattered.popleft()
            yield from wait_for([request])
            gathered.append(_gather_sums(comm, terms, sums, arrived, pieces))
        if step < chunks:
            scattered.append(_scatter(comm, vector, _chunk(owned, step * rows, rows)))
        if len(gathered) > ahead:
            yield from wait_for([gathered.popleft()])
    yield from wait_for(gathered)
    own = int(owned.counts[rank])
    return row * (int(owned.counts.sum()) - own + (size - 1) * own)


def _chunk(owned: Pieces, offset: int, rows: int) -> Pieces:
    """At most ``rows`` elements of each shard, from an offset on."""
    skipped = np.minimum(owned.counts, offset)
    return Pieces(owned.starts + skipped, np.minimum(owned.counts - skipped, rows))


def _scatter(
    comm: Comm, vector: np.ndarray, pieces: Pieces
) -> tuple[Pieces, np.ndarray, MpiRequest]:
    """Starts to send each piece to its owner, and to receive all members' own pieces."""
    size, rank, row = comm.Get_size(), comm.Get_rank(), row_bytes(vector)
    own = int(pieces.counts[rank])
    terms = np.empty((size, own, *vector.shape[1:]), vector.dtype)
    # MPICH copies what a member sends to itself in steps of 8 KB, one for each test.
    terms[rank] = vector[pieces.of(rank)]
    others = np.arange(size) != rank
    sent = Pieces(pieces.starts, pieces.counts * others)
    received = Pieces(np.arange(size) * own, own * others)
    request = comm.Ialltoallv(_buffer(vector, sent, row), _buffer(terms, received, row))
    return pieces, terms, request


def _gather_sums(
    comm: Comm, terms: np.ndarray, sums: np.ndarray, arrived: np.ndarray, pieces: Pieces
) -> MpiRequest:
    """Adds the terms of the own piece, and starts to send the sum to all members."""
    own, dtype = pieces.of(comm.Get_rank()), arrived.dtype
    if format_of(dtype):
        # Only the owner knows the rounding error, which its error feedback sends later.
        sum_blocks(terms, sums[own], arrived[own])
    elif arrived is sums:
        add_in_order(terms, sums[own])
    else:
        total = np.empty(terms.shape[1:], sums.dtype)
        add_in_order(terms, total)
        arrived[own] = pack_sum(total, dtype, comm.Get_size())
    return comm.Iallgatherv(None, _buffer(arrived, pieces, row_bytes(arrived)))  # None: in place


def _buffer(array: np.ndarray, pieces: Pieces, row: int) -> list:
    """What mpi4py takes for a vector of which each member sends or receives a piece."""
    # mpi4py reads each number on its own. With lists this takes a third of the time.
    starts, counts = ((row * numbers).tolist() for numbers in pieces)
    return [array.reshape(-1).view(np.uint8), (counts, starts), "B"]


def add_in_order(terms: np.ndarray, out: np.ndarray) -> None:
    """Adds arrays in their order, ``out = ((terms[0] + terms[1]) + terms[2]) + ...``.

    >>> total = np.empty(2, np.float32)
    >>> add_in_order(np.array([[1, 2], [3, 4]], np.float32), total)
    >>> total.tolist()
    [4.0, 6.0]
    """
    rows = max(1, _ADDED_AT_ONCE // max(1, terms[:, :1].size))
    for lo in range(0, terms.shape[1], rows):
        wide = widened(terms[:, lo : lo + rows])
        if wide[0].size > 1:
            np.add.reduce(wide, axis=0, out=out[lo : lo + rows])
        else:  # NumPy would add pairs of a single column
            out[lo : lo + rows] = np.add.accumulate(wide, axis=0)[-1]


def widen_sums(arrived: np.ndarray, sums: np.ndarray, size: int, kept: slice) -> Operation:
    """Converts rounded sums of ``size`` members to their accumulation dtype, except ``kept``."""
    rows = max(1, _CONVERTED_AT_ONCE // sums[:1].size) if len(sums) else 1
    factor = sum_divisor(arrived.dtype, size)
    for first, end in ((0, kept.start), (kept.stop, len(sums))):
        for lo in range(first, end, rows):
            place = slice(lo, min(lo + rows, end))
            if format_of(arrived.dtype):
                unpack_blocks(arrived[place], sums[place])
            else:
                np.multiply(widened(arrived[place]), factor, out=sums[place])
            yield WaitState(progressed=True)


def subtract_product(sums: np.ndarray, own: np.ndarray, factor: float) -> Operation:
    """Subtracts ``factor * own``, an array in its wire dtype, from sums in their dtype."""
    for lo in range(0, len(sums), _CONVERTED_AT_ONCE):
        place = slice(lo, lo + _CONVERTED_AT_ONCE)
        sums[place] -= widened(own[place]) * sums.dtype.type(factor)
        yield WaitState(progressed=True)


def widened(array: np.ndarray) -> np.ndarray:
    """Converts an array from its wire dtype to its accumulation dtype.

    bfloat16 is the upper half of float32. Shifting it is several times faster than a cast, and
    NumPy releases the interpreter lock meanwhile.

    >>> import jax.numpy as jnp, numpy as np
    >>> widened(np.array([1.5, -2.0], jnp.bfloat16)).tolist()
    [1.5, -2.0]
    """
    if array.dtype.name == "bfloat16":
        return np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return array.astype(sum_dtype(array.dtype), copy=False)
