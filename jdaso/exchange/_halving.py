"""A sum over members by recursive halving and doubling, for 2, 4, 8, ... of them.

Two members that are P/2 apart halve between them what they add up, then two that are P/4 apart,
and so on, until each has the sum of its own shard; the same way back the sums double. The bytes of
a ring in 2 log2(P) messages instead of 2 (P-1), one after the other; a wire narrower than the sum
rounds at every one.

References:
    Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from jdaso.exchange._messages import Waits, packed_sum, trade, widened, widened_sum


def halving(
    comm: Any, vector: np.ndarray, sums: np.ndarray, shards: Sequence[slice], tag: int
) -> Waits:
    """Sums what is given of each member's shard; returns the bytes sent."""
    size, rank = comm.Get_size(), comm.Get_rank()
    distances = [1 << i for i in range(size.bit_length() - 1)]
    sent = 0

    def block(member: int, distance: int) -> range:
        """So many shards, that of a member among them."""
        start = member - member % distance
        return range(start, start + distance)

    def swap(partner: int, give: list[np.ndarray], take: range) -> Waits:
        nonlocal sent
        lengths = [shards[i].stop - shards[i].start for i in take]
        incoming = np.empty((sum(lengths), *vector.shape[1:]), vector.dtype)
        sent += yield from trade(comm, np.concatenate(give), partner, incoming, partner, tag)
        return np.split(incoming, list(accumulate(lengths))[:-1])

    totals = [widened(vector[shard]) for shard in shards]
    for distance in reversed(distances):
        partner, terms = rank ^ distance, size // (2 * distance)
        give = [packed_sum(totals[i], vector.dtype, terms) for i in block(partner, distance)]
        arrived = yield from swap(partner, give, block(rank, distance))
        for i, piece in zip(block(rank, distance), arrived, strict=True):
            totals[i] = totals[i] + widened_sum(piece, terms)

    packed = {rank: packed_sum(totals[rank], vector.dtype, size)}
    for distance in distances:
        partner = rank ^ distance
        give = [packed[i] for i in block(rank, distance)]
        arrived = yield from swap(partner, give, block(partner, distance))
        packed.update(zip(block(partner, distance), arrived, strict=True))
    for i, piece in packed.items():
        sums[shards[i]] = widened_sum(piece, size)
    return sent
