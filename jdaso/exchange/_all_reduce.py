"""A sum over nodes in two passes of point-to-point messages, as an operation of the thread.

The vector is cut into one shard per member, and every shard into as many chunks. First each member
sends every other member a chunk of that one's shard and adds up what it receives for its own, in
member order and in float32; then it sends the rounded result to all. A member sends 2 (P-1)/P of
the vector's bytes on the wire, which is what a ring all-reduce sends, in a format that MPI need
not know, with two roundings instead of P, and every member ends with the same bits; with the wire
int8 but for its own shard, of which it keeps the sum as it was before it was rounded. Point-to-
point, because then it is known from whom nothing has come.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from jdaso._wire import BLOCKS, back_factor, pack_sum, sum_dtype, unpack

# Chunks under way at a time: enough to keep a fast network busy between two looks at it.
WINDOW = 8
Waiting = Generator[frozenset[int], None, int]


def all_reduce(
    comm: Any,
    vector: np.ndarray,
    sums: np.ndarray,
    chunk_elements: int,
    first_tag: int,
) -> Waiting:
    """Sums a vector over the members of a communicator.

    Args:
        comm: an mpi4py communicator that nobody else uses.
        vector: this member's contribution in its wire dtype, one-dimensional, or rows of bytes.
        sums: where the result goes, of the same length, in ``sum_dtype(vector.dtype)``.
        chunk_elements: elements of one message at most.
        first_tag: messages use the tags ``first_tag ... first_tag + 2 * WINDOW - 1``.

    Returns:
        Bytes sent by this member.
    """
    owned = shards(len(vector), comm.Get_size())
    longest = max(shard.stop - shard.start for shard in owned)
    chunks = (
        # A member has chunks of 2 * WINDOW consecutive numbers under way with another at most:
        # with as many tags, no message can be taken for one of another chunk.
        _all_reduce_chunk(
            comm, vector, sums, [_chunk(s, lo, chunk_elements) for s in owned], first_tag + tag
        )
        for lo, tag in zip(
            range(0, longest, chunk_elements), cycle(range(2 * WINDOW)), strict=False
        )
    )
    return (yield from _side_by_side(chunks))


def shards(length: int, size: int) -> list[slice]:
    """What of a vector each member adds up, whatever the chunks.

    >>> shards(7, 2)
    [slice(0, 3, None), slice(3, 7, None)]
    """
    bounds = [length * member // size for member in range(size + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def _chunk(shard: slice, offset: int, elements: int) -> slice:
    """So many elements of a shard, or those that there still are."""
    start = min(shard.start + offset, shard.stop)
    return slice(start, min(start + elements, shard.stop))


def _side_by_side(operations: Iterable[Waiting]) -> Waiting:
    """Runs operations side by side; returns the sum of their results.

    An operation starts when all but the last WINDOW before it have ended: it is not enough that
    fewer than WINDOW are active, since one that is late would let the others run far ahead.
    """
    rest = enumerate(operations)
    active: dict[int, Waiting] = {}
    result = started = 0
    while True:
        oldest = min(active, default=started)
        for number, operation in islice(rest, oldest + WINDOW - started):
            active[number] = operation
            started += 1
        if not active:
            return result
        waiting: frozenset[int] = frozenset()
        for number, operation in list(active.items()):
            try:
                waiting |= next(operation)
            except StopIteration as end:
                del active[number]
                result += end.value
        if waiting:
            yield waiting


def _all_reduce_chunk(
    comm: Any, vector: np.ndarray, sums: np.ndarray, shards: Sequence[slice], tag: int
) -> Waiting:
    """Sums what is given of each member's shard."""
    size, rank = comm.Get_size(), comm.Get_rank()
    # Peers in the order of their distance, so that not all members begin with the same one.
    peers = [(rank + i) % size for i in range(1, size)]

    own = vector[shards[rank]]
    pieces = {peer: np.empty_like(own) for peer in peers}
    receives = {peer: _receive(comm, pieces[peer], peer, tag) for peer in peers}
    sends = {peer: _send(comm, vector[shards[peer]], peer, tag) for peer in peers}
    yield from wait_for(receives)

    pieces[rank] = own
    wide = vector.dtype == sums.dtype
    terms = [widened(pieces[member]) for member in range(size)]
    total = sums[shards[rank]] if wide else np.empty(terms[0].shape, sums.dtype)
    _add_up(terms, total)
    back = total if wide else pack_sum(total, vector.dtype, size)

    arrived = {
        peer: sums[shards[peer]] if wide else np.empty_like(vector[shards[peer]]) for peer in peers
    }
    arrived[rank] = back
    receives = {peer: _receive(comm, arrived[peer], peer, tag) for peer in peers}
    sends_back = {peer: _send(comm, back, peer, tag) for peer in peers}
    yield from wait_for(receives)
    factor = back_factor(vector.dtype, size)
    for member in range(size):
        if not wide:
            np.multiply(widened(arrived[member]), factor, out=sums[shards[member]])
    if vector.dtype == BLOCKS:
        # Only here it is known what rounding takes off: who receives it sends that later.
        sums[shards[rank]] = total
    # The buffers must live until the last of these has left.
    yield from wait_for(sends)
    yield from wait_for(sends_back)
    return sum(vector[shards[peer]].nbytes for peer in peers) + (size - 1) * own.nbytes


def _add_up(pieces: Sequence[np.ndarray], total: np.ndarray) -> None:
    """The sum of arrays, from the first to the last, in as few passes as there can be."""
    np.add(pieces[0], pieces[1] if len(pieces) > 1 else 0, out=total)
    for piece in pieces[2:]:
        total += piece


def wait_for(requests: dict[int, Any]) -> Generator[frozenset[int], None, None]:
    """Yields the ranks of the communicator whose requests are not complete, until all are."""
    pending = {peer: request for peer, request in requests.items() if request is not None}
    while True:
        pending = {peer: request for peer, request in pending.items() if not request.Test()}
        if not pending:
            return
        yield frozenset(pending)


def widened(array: np.ndarray) -> np.ndarray:
    """An array in the dtype in which it is added up.

    bfloat16 is the upper half of float32: shifting it is several times faster than a cast, and
    numpy does it without holding the interpreter.

    >>> import jax.numpy as jnp, numpy as np
    >>> widened(np.array([1.5, -2.0], jnp.bfloat16)).tolist()
    [1.5, -2.0]
    """
    if array.dtype.name == "bfloat16":
        return np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    if array.dtype == BLOCKS:
        return unpack(array)
    return array.astype(sum_dtype(array.dtype), copy=False)


def _send(comm: Any, array: np.ndarray, peer: int, tag: int) -> Any:
    return comm.Isend(array.view(np.uint8), dest=peer, tag=tag) if array.size else None


def _receive(comm: Any, array: np.ndarray, peer: int, tag: int) -> Any:
    return comm.Irecv(array.view(np.uint8), source=peer, tag=tag) if array.size else None
