"""The patterns in which the members of a communicator sum a vector.

Each sums the given elements of each member's shard, and returns the bytes sent. In ``ring`` and
``halving``, a wire narrower than the sum rounds at every message.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from jdaso.core.mpi_types import Comm
from jdaso.core.wire import BLOCK_DTYPE, sum_divisor
from jdaso.exchange.transport.operation import Operation, wait_for
from jdaso.exchange.transport.point_to_point import (
    packed_sum,
    receive,
    send,
    send_receive,
    widened,
    widened_sum,
)


def direct(
    comm: Comm, vector: np.ndarray, sums: np.ndarray, shards: Sequence[slice], tag: int
) -> Operation:
    """Every shard goes to its owner, and the owner's sum to all members.

    Each member sends every other member that member's shard. It adds what it receives for its own
    shard, in member order and in float32, and sends the rounded sum to all. This takes two
    latencies and rounds twice, whatever the number of members, with P-1 messages at the same time.
    With the wire int8, the owner keeps the sum of its own shard without rounding.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    # Peers in order of distance, so that members do not all start with the same peer.
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
    np.add(terms[0], terms[1] if size > 1 else 0, out=total)  # the fewest passes over memory
    for term in terms[2:]:
        total += term
    back = packed_sum(total, vector.dtype, size)

    arrived = {
        peer: sums[shards[peer]] if wide else np.empty_like(vector[shards[peer]]) for peer in peers
    }
    arrived[rank] = back
    receives = {peer: receive(comm, arrived[peer], peer, tag) for peer in peers}
    sends_back = {peer: send(comm, back, peer, tag) for peer in peers}
    yield from wait_for(receives)
    factor = sum_divisor(vector.dtype, size)
    for member in range(size):
        if not wide:
            np.multiply(widened(arrived[member]), factor, out=sums[shards[member]])
    if vector.dtype == BLOCK_DTYPE:
        # Only the owner knows the rounding error, which its error feedback sends later.
        sums[shards[rank]] = total
    # The buffers must live until all sends have completed.
    yield from wait_for(sends)
    yield from wait_for(sends_back)
    return sum(vector[shards[peer]].nbytes for peer in peers) + (size - 1) * own.nbytes


def ring(
    comm: Comm, vector: np.ndarray, sums: np.ndarray, shards: Sequence[slice], tag: int
) -> Operation:
    """Each member receives from its left and sends to its right, 2 (P-1) times.

    In the first round, a shard travels from the member after its owner to its owner, and each
    member adds its own elements. In the second round, the sums travel on. Only one peer sends to a
    member at a time. In return, there are 2 (P-1) latencies.

    References:
        Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations,
        Journal of Parallel and Distributed Computing 69, 2009.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    left, right = (rank - 1) % size, (rank + 1) % size

    def pass_on(outgoing: np.ndarray, place: slice) -> Operation:
        incoming = np.empty_like(vector[place])
        sent = yield from send_receive(comm, outgoing, right, incoming, left, tag)
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


def halving(
    comm: Comm, vector: np.ndarray, sums: np.ndarray, shards: Sequence[slice], tag: int
) -> Operation:
    """Recursive halving and doubling, for 2, 4, 8, ... members.

    Two members at distance P/2 divide the shards that they sum between them, then two at distance
    P/4, and so on, until each has the sum of its own shard. The sums then spread in the opposite
    order. This takes 2 log2(P) messages, one after the other.

    References:
        Rabenseifner, Optimization of collective reduction operations, ICCS 2004.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    distances = [1 << i for i in range(size.bit_length() - 1)]
    sent = 0

    def block(member: int, distance: int) -> range:
        """The aligned block of ``distance`` shards that contains a member's shard."""
        start = member - member % distance
        return range(start, start + distance)

    def swap(partner: int, give: list[np.ndarray], take: range) -> Operation:
        nonlocal sent
        lengths = [shards[i].stop - shards[i].start for i in take]
        incoming = np.empty((sum(lengths), *vector.shape[1:]), vector.dtype)
        sent += yield from send_receive(comm, np.concatenate(give), partner, incoming, partner, tag)
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
