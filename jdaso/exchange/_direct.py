"""A sum over members in two passes: every shard to its owner, the owners' sums to all.

Each member sends every other member that one's shard and adds up what it receives for its own, in
member order and in float32; then it sends the rounded result to all. Two latencies and two
roundings, whatever the number of members, but P-1 messages side by side. With the wire int8 an
owner keeps the sum of its own shard as it was before it was rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jdaso._wire import BLOCKS, back_factor
from jdaso.exchange._messages import Waits, packed_sum, receive, send, wait_for, widened


def direct(
    comm: Any, vector: np.ndarray, sums: np.ndarray, shards: Sequence[slice], tag: int
) -> Waits:
    """Sums what is given of each member's shard; returns the bytes sent."""
    size, rank = comm.Get_size(), comm.Get_rank()
    # Peers in the order of their distance, so that not all members begin with the same one.
    peers = [(rank + i) % size for i in range(1, size)]

    own = vector[shards[rank]]
    pieces = {peer: np.empty_like(own) for peer in peers}
    receives = {peer: receive(comm, pieces[peer], peer, tag) for peer in peers}
    sends = {peer: send(comm, vector[shards[peer]], peer, tag) for peer in peers}
    yield from wait_for(receives)

    pieces[rank] = own
    wide = vector.dtype == sums.dtype
    terms = [widened(pieces[member]) for member in range(size)]
    total = sums[shards[rank]] if wide else np.empty(terms[0].shape, sums.dtype)
    _add_up(terms, total)
    back = packed_sum(total, vector.dtype, size)

    arrived = {
        peer: sums[shards[peer]] if wide else np.empty_like(vector[shards[peer]]) for peer in peers
    }
    arrived[rank] = back
    receives = {peer: receive(comm, arrived[peer], peer, tag) for peer in peers}
    sends_back = {peer: send(comm, back, peer, tag) for peer in peers}
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
