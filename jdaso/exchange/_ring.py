"""A sum over members in a ring: each hears from its left and tells its right, 2 (P-1) times.

In the first round a shard travels from the member after its owner to its owner, and everyone adds
its own to what comes by; in the second the sums travel on. No member is written to by more than
one other; for that there are 2 (P-1) latencies, and a wire narrower than the sum rounds at every
hop.

References:
    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
    Journal of Parallel and Distributed Computing 69, 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jdaso.exchange._messages import Waits, packed_sum, trade, widened, widened_sum


def ring(
    comm: Any, vector: np.ndarray, sums: np.ndarray, shards: Sequence[slice], tag: int
) -> Waits:
    """Sums what is given of each member's shard; returns the bytes sent."""
    size, rank = comm.Get_size(), comm.Get_rank()
    left, right = (rank - 1) % size, (rank + 1) % size

    def pass_on(outgoing: np.ndarray, place: slice) -> Waits:
        incoming = np.empty_like(vector[place])
        sent = yield from trade(comm, outgoing, right, incoming, left, tag)
        return incoming, sent

    outgoing, sent = vector[shards[left]], 0
    total = widened(vector[shards[rank]])
    for hop in range(1, size):
        place = shards[(left - hop) % size]
        incoming, more = yield from pass_on(outgoing, place)
        sent += more
        total = widened_sum(incoming, hop) + widened(vector[place])
        outgoing = packed_sum(total, vector.dtype, hop + 1)

    outgoing = packed_sum(total, vector.dtype, size)
    sums[shards[rank]] = widened_sum(outgoing, size)
    for hop in range(1, size):
        place = shards[(rank - hop) % size]
        outgoing, more = yield from pass_on(outgoing, place)
        sent += more
        sums[place] = widened_sum(outgoing, size)
    return sent
