"""The all-reduce of a vector by point-to-point messages.

The vector is cut into one shard per member, and each shard into the same number of chunks. A
pattern sums the chunks of one number, and several numbers run interleaved. In all patterns each
member sends 2 (P-1)/P of the vector's bytes, the least that an all-reduce can. MPI need not know
the wire format, all members get the same bits, and point-to-point messages tell which peer is late.
"""

from collections.abc import Sequence
from itertools import cycle, pairwise

import numpy as np

from jdaso.core.mpi_types import Comm
from jdaso.exchange.transport.operation import WINDOW, Operation, interleave
from jdaso.exchange.transport.patterns import direct, halving, ring

# jdaso.perf uses the same names.
PATTERNS = {"direct": direct, "ring": ring, "halving": halving}


def all_reduce(
    comm: Comm,
    vector: np.ndarray,
    sums: np.ndarray,
    owned: Sequence[slice],
    chunk_elements: int,
    first_tag: int,
    pattern: str = "direct",
) -> Operation:
    """Sums a vector over the members of a communicator; returns the bytes sent by this member.

    Args:
        comm: Communicator that nothing else uses meanwhile.
        vector: This member's contribution in its wire dtype, one-dimensional or rows of bytes.
        sums: Receives the result, with the length of ``vector``, in ``sum_dtype(vector.dtype)``.
        owned: The elements that each member sums. Elements of no member are not exchanged.
        chunk_elements: Largest number of elements of one message.
        first_tag: Messages use the tags ``first_tag ... first_tag + 2 * WINDOW - 1``.
    """
    longest = max(shard.stop - shard.start for shard in owned)
    # A message of halving holds the chunks of half the members. A member of direct receives one
    # chunk from each other member at the same time, and needs memory for all of them.
    together = {"direct": len(owned) - 1, "halving": len(owned) // 2}.get(pattern, 1)
    chunk_elements = max(1, chunk_elements // max(1, together))
    chunks = (
        # A chunk completes at one member only after all others have started it. Two members thus
        # have chunks of at most 2 * WINDOW consecutive numbers in progress. With as many tags, no
        # message is mistaken for one of another chunk.
        PATTERNS[pattern](
            comm, vector, sums, [_chunk(s, lo, chunk_elements) for s in owned], first_tag + tag
        )
        for lo, tag in zip(
            range(0, longest, chunk_elements), cycle(range(2 * WINDOW)), strict=False
        )
    )
    return (yield from interleave(chunks))


def shards(length: int, size: int) -> list[slice]:
    """The elements of a vector that each of ``size`` members sums.

    >>> shards(7, 2)
    [slice(0, 3, None), slice(3, 7, None)]
    """
    bounds = [length * member // size for member in range(size + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def part(owned: Sequence[slice], index: int, parts: int) -> list[slice]:
    """One part of each member's shard. The parts do not change which member sums an element.

    >>> part(shards(12, 2), 0, 3), part(shards(12, 2), 2, 3)
    ([slice(0, 2, None), slice(6, 8, None)], [slice(4, 6, None), slice(10, 12, None)])
    """
    pieces = [shards(shard.stop - shard.start, parts)[index] for shard in owned]
    return [
        slice(shard.start + piece.start, shard.start + piece.stop)
        for shard, piece in zip(owned, pieces, strict=True)
    ]


def _chunk(shard: slice, offset: int, elements: int) -> slice:
    """At most ``elements`` elements of a shard, from an offset on."""
    start = min(shard.start + offset, shard.stop)
    return slice(start, min(start + elements, shard.stop))
