"""Collective operations on host memory, advanced by the progress thread.

:func:`all_reduce` sums a vector on MPI's collectives. Each member of a communicator owns a shard of
the vector. The shards are summed in chunks, which are a piece of every shard:

1. ``Ialltoallv`` sends each piece to its owner.
2. The owner adds the pieces in the order of members and rounds the sum to the wire dtype.
3. ``Iallgatherv`` sends the rounded sums to all members.

Each member sends 2 (P-1)/P of the vector's bytes, the least that an all-reduce can. If the vectors
of all members together are no longer than a message, a single ``Iallgather`` sends them to all, and
each member adds them. The bits depend neither on MPI nor on the chunks. MPI need not know the wire
dtype.

All members must post the collectives of a communicator in the same order, whatever completes first.
With two chunks at a time, the order is: pieces 0, pieces 1, sums 0, pieces 2, sums 1, and so on.

A collective cannot be cancelled, so its buffers must live until it completes. The request refers to
them, and the suspended operation refers to the request. ``Progress`` keeps failed operations until
the process ends.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import zip_longest

import jax.numpy as jnp
import numpy as np

from jdaso.cluster.mpi_types import Comm, MpiRequest
from jdaso.core.block_format import format_of
from jdaso.core.types import JdasoError
from jdaso.core.wire import Pieces, pack_sum, shards, sum_divisor, sum_dtype
from jdaso.exchange.host.layout import Memory
from jdaso.exchange.host.slots import sum_blocks, unpack_blocks
from jdaso.exchange.transport.progress import Operation, WaitState, wait_for

# MPI counts bytes in 32 bits. Longer vectors are summed in segments.
_SEGMENT_BYTES = 1 << 30
# Messages are not cut further, because smaller ones cost more time than they save.
_LEAST_MESSAGE_BYTES = 1 << 16
# Chunks in progress at a time: enough to keep a fast network busy between two polls, unless they
# take more memory than this.
_MOST_CHUNKS, _LEAST_CHUNKS, _CHUNKS_BYTES = 4, 2, 1 << 25
# Numbers that are added or converted at a time, few enough that they stay in a cache.
_ADDED_AT_ONCE, _CONVERTED_AT_ONCE = 1 << 17, 1 << 20
_BFLOAT16 = np.dtype(jnp.bfloat16)


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
    spare: list[np.ndarray],
) -> Operation:
    """Sums a vector over the members of a communicator; returns the bytes sent.

    Args:
        comm: Communicator that nothing else uses meanwhile.
        vector: This member's contribution in its wire dtype, one-dimensional or rows of bytes.
        sums: With int8 and float4, receives the sums of the own pieces, which are not rounded.
        arrived: Receives the rounded sums. It is ``sums`` if the wire dtype is that of sums.
        chunk_bytes: Largest size of one message in bytes.
        spare: Memory of earlier sums, which is used again. New memory would cost a page fault for
            each 4 KB.
    """
    size, rank, row = comm.Get_size(), comm.Get_rank(), row_bytes(vector)
    if size * len(vector) * row <= min(chunk_bytes, _LEAST_MESSAGE_BYTES):
        terms = np.empty((size, *vector.shape), vector.dtype)
        yield from wait_for([comm.Iallgather(_bytes(vector), _bytes(terms))])
        _add_terms(terms, sums, arrived)
        return (size - 1) * len(vector) * row
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
            assert terms.base is not None
            spare.append(terms.base)
        if step < chunks:
            skipped = np.minimum(owned.counts, step * rows)
            pieces = Pieces(owned.starts + skipped, np.minimum(owned.counts - skipped, rows))
            scattered.append(_scatter(comm, vector, pieces, spare))
        if len(gathered) > ahead:
            yield from wait_for([gathered.popleft()])
    yield from wait_for(gathered)
    own = int(owned.counts[rank])
    return row * (int(owned.counts.sum()) - own + (size - 1) * own)


def _scatter(
    comm: Comm, vector: np.ndarray, pieces: Pieces, spare: list[np.ndarray]
) -> tuple[Pieces, np.ndarray, MpiRequest]:
    """Starts to send each piece to its owner, and to receive all members' own pieces."""
    size, rank, row = comm.Get_size(), comm.Get_rank(), row_bytes(vector)
    own = int(pieces.counts[rank])
    terms = (
        _memory(spare, size * own * row).view(vector.dtype).reshape(size, own, *vector.shape[1:])
    )
    # MPICH copies what a member sends to itself in steps of 8 KB, one for each test.
    terms[rank] = vector[pieces.of(rank)]
    others = np.arange(size) != rank
    sent = Pieces(pieces.starts, pieces.counts * others)
    received = Pieces(np.arange(size) * own, own * others)
    request = comm.Ialltoallv(_buffer(vector, sent, row), _buffer(terms, received, row))
    return pieces, terms, request


def _memory(spare: list[np.ndarray], nbytes: int) -> np.ndarray:
    """Returns bytes of spare memory, or new ones. What is too small is given back."""
    while spare:
        memory = spare.pop()
        if len(memory) >= nbytes:
            return memory[:nbytes]
    return np.empty(nbytes, np.uint8)[:]


def _gather_sums(
    comm: Comm, terms: np.ndarray, sums: np.ndarray, arrived: np.ndarray, pieces: Pieces
) -> MpiRequest:
    """Adds the terms of the own piece, and starts to send the sum to all members."""
    own = pieces.of(comm.Get_rank())
    _add_terms(terms, sums[own], arrived[own])
    return comm.Iallgatherv(None, _buffer(arrived, pieces, row_bytes(arrived)))  # None: in place


def _add_terms(terms: np.ndarray, sums: np.ndarray, arrived: np.ndarray) -> None:
    """Adds the terms of all members, and rounds the sum to the wire dtype."""
    if format_of(arrived.dtype):
        # A member that adds knows the rounding error. The owner's error feedback sends it later.
        sum_blocks(terms, sums, arrived)
    elif arrived.dtype == sums.dtype:
        add_in_order(terms, sums)
    else:
        total = np.empty(terms.shape[1:], sums.dtype)
        add_in_order(terms, total)
        arrived[...] = pack_sum(total, arrived.dtype, len(terms))


def _buffer(array: np.ndarray, pieces: Pieces, row: int) -> list:
    """What mpi4py takes for a vector of which each member sends or receives a piece."""
    # mpi4py reads each number on its own. With lists this takes a third of the time.
    starts, counts = ((row * numbers).tolist() for numbers in pieces)
    return [_bytes(array), (counts, starts), "B"]


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


def widened(array: np.ndarray) -> np.ndarray:
    """Converts an array from its wire dtype to its accumulation dtype.

    bfloat16 is the upper half of float32. Shifting it is several times faster than a cast, and
    NumPy releases the interpreter lock meanwhile.

    >>> import jax.numpy as jnp, numpy as np
    >>> widened(np.array([1.5, -2.0], jnp.bfloat16)).tolist()
    [1.5, -2.0]
    """
    if array.dtype == _BFLOAT16:
        return np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    return array.astype(sum_dtype(array.dtype), copy=False)


_BROADCAST_BYTES = 1 << 26
_OUTLINE = np.dtype([("digest", "V32"), ("length", "<i8")])


def sum_staged(
    comm: Comm, memory: Memory, members: float, chunk_bytes: int, spare: list[np.ndarray]
) -> Operation:
    """Sums a slot's memory over a communicator of all nodes; returns the bytes sent.

    If the layout is ``relative``, the sums are without what this process has sent, times
    ``members``, the number of nodes that contribute. For the other arguments see ``all_reduce``.
    """
    parts = []
    for (vector, sums), arrived in zip(memory.pairs, memory.arrived, strict=True):
        for place in segments(vector):
            own_sums = sums[place]
            received = own_sums if arrived is sums else arrived[place]
            parts.append((vector[place], own_sums, received))
    sent, size = 0, comm.Get_size()
    for part in parts:
        sent += yield from all_reduce(comm, *part, chunk_bytes, spare)
    for vector, sums, arrived in parts:
        if arrived is not sums:
            own = shards(len(vector), size).of(comm.Get_rank())
            kept = own if format_of(vector.dtype) else slice(0, 0)
            yield from widen_sums(arrived, sums, size, kept)
    if memory.layout.relative:
        for vector, sums, _ in parts:
            for lo in range(0, len(sums), _CONVERTED_AT_ONCE):
                place = slice(lo, lo + _CONVERTED_AT_ONCE)
                sums[place] -= widened(vector[place]) * sums.dtype.type(members)
                yield WaitState(progressed=True)
    return sent


def broadcast(comm: Comm, arrays: Sequence[np.ndarray], root: int) -> Operation:
    """Overwrites the arrays with those of rank ``root``."""
    yield from wait_for(
        comm.Ibcast(piece, root=root) for array in arrays for piece in _countable(array)
    )


def pass_on(comm: Comm, memory: Memory, root: int, others: Collection[int]) -> Operation:
    """Sends all sums from rank ``root`` to others."""
    requests: list[MpiRequest] = []
    for _, sums in memory.pairs:
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
