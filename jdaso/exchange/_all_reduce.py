"""A sum over nodes by point-to-point messages, as an operation of the thread.

The vector is cut into one shard per member, and every shard into as many chunks; what a pattern
does with the members' chunks of the same number, it does with some of them side by side. All
patterns send 2 (P-1)/P of the vector's bytes from each member, the least that an all-reduce can,
in a format that MPI need not know, and every member ends with the same bits. Point-to-point,
because then it is known from whom nothing has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from jdaso.exchange._direct import direct
from jdaso.exchange._halving import halving
from jdaso.exchange._messages import Waiting, Waits
from jdaso.exchange._ring import ring

# In the words of jdaso.perf.
PATTERNS = {"direct": direct, "ring": ring, "halving": halving}
# Chunks under way at a time: enough to keep a fast network busy between two looks at it.
WINDOW = 8


def all_reduce(
    comm: Any,
    vector: np.ndarray,
    sums: np.ndarray,
    owned: Sequence[slice],
    chunk_elements: int,
    first_tag: int,
    pattern: str = "direct",
) -> Waits:
    """Sums a vector over the members of a communicator.

    Args:
        comm: an mpi4py communicator that nobody else uses.
        vector: this member's contribution in its wire dtype, one-dimensional, or rows of bytes.
        sums: where the result goes, of the same length, in ``sum_dtype(vector.dtype)``.
        owned: what of the vector each member adds up; what no member does is not exchanged.
        chunk_elements: elements of one message at most.
        first_tag: messages use the tags ``first_tag ... first_tag + 2 * WINDOW - 1``.
        pattern: one of ``PATTERNS``.

    Returns:
        Bytes sent by this member.
    """
    longest = max(shard.stop - shard.start for shard in owned)
    # A message of halving has the chunks of half the members; direct receives as many at once as
    # there are others, and needs memory for them.
    together = {"direct": len(owned) - 1, "halving": len(owned) // 2}.get(pattern, 1)
    chunk_elements = max(1, chunk_elements // max(1, together))
    chunks = (
        # A chunk has ended at one member when all others have begun it: a member has chunks of
        # 2 * WINDOW consecutive numbers under way with another at most. With as many tags, no
        # message can be taken for one of another chunk.
        PATTERNS[pattern](
            comm, vector, sums, [_chunk(s, lo, chunk_elements) for s in owned], first_tag + tag
        )
        for lo, tag in zip(
            range(0, longest, chunk_elements), cycle(range(2 * WINDOW)), strict=False
        )
    )
    return (yield from side_by_side(chunks))


def shards(length: int, size: int) -> list[slice]:
    """What of a vector each member adds up, whatever the chunks.

    >>> shards(7, 2)
    [slice(0, 3, None), slice(3, 7, None)]
    """
    bounds = [length * member // size for member in range(size + 1)]
    return [slice(*pair) for pair in pairwise(bounds)]


def part(owned: Sequence[slice], index: int, parts: int) -> list[slice]:
    """A part of each member's shard, so that who adds up what stays as it is.

    >>> part(shards(12, 2), 0, 3), part(shards(12, 2), 2, 3)
    ([slice(0, 2, None), slice(6, 8, None)], [slice(4, 6, None), slice(10, 12, None)])
    """
    pieces = [shards(shard.stop - shard.start, parts)[index] for shard in owned]
    return [
        slice(shard.start + piece.start, shard.start + piece.stop)
        for shard, piece in zip(owned, pieces, strict=True)
    ]


def _chunk(shard: slice, offset: int, elements: int) -> slice:
    """So many elements of a shard, or those that there still are."""
    start = min(shard.start + offset, shard.stop)
    return slice(start, min(start + elements, shard.stop))


def side_by_side(operations: Iterable[Waits]) -> Waits:
    """Runs operations side by side; returns the sum of their results.

    An operation starts when all but the last WINDOW before it have ended: it is not enough that
    fewer than WINDOW are active, since one that is late would let the others run far ahead.
    """
    rest = enumerate(operations)
    active: dict[int, Waits] = {}
    result = started = 0
    while True:
        oldest = min(active, default=started)
        for number, operation in islice(rest, oldest + WINDOW - started):
            active[number] = operation
            started += 1
        if not active:
            return result
        ranks: frozenset[int] = frozenset()
        requests: tuple[Any, ...] = ()
        moved = ask = False
        for number, operation in list(active.items()):
            try:
                waiting = next(operation)
                ranks, requests = ranks | waiting.ranks, requests + waiting.requests
                moved, ask = moved or waiting.moved, ask or not waiting.requests
            except StopIteration as end:
                del active[number]
                # The next one can start at once, whatever the others wait for.
                result, moved, ask = result + end.value, True, True
        if active:  # the root of a broadcast waits for nobody that it knows
            yield Waiting(ranks, moved, () if ask else requests)
