"""Which processes carry an exchange, and over which communicators."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jdaso._base import UNCOUNTED
from jdaso.exchange import _operations as operations
from jdaso.exchange._all_reduce import part, shards, side_by_side
from jdaso.exchange._messages import Waits
from jdaso.exchange._operations import Strategy as Strategy
from jdaso.exchange._request import Request, after
from jdaso.exchange._staging import Staging
from jdaso.topology import Topology


class Channel(NamedTuple):
    """The communicators of one local index.

    Attributes:
        group: over the nodes; None in a process that does not carry this index.
        node: over the processes of this node; None where a node is one process.
        carrier: local rank of the processes that carry this index.
    """

    group: Any
    node: Any
    carrier: int


class Channels:
    """The communicators of all local indices; collective over all processes.

    Args:
        topology: who the others are.
        strategy: how exchanges cross.
    """

    def __init__(self, topology: Topology, strategy: Strategy):
        self._topology = topology
        self._strategy = strategy
        self._channels = _channels(topology)
        # For consensus, which must not meet what is in flight.
        self._aside = _channels(topology)[:1]
        self._greetings = topology.comm.Dup()
        places, own = topology.places, topology.places[topology.rank]
        ranks = range(len(places))
        # In the order of the members of each communicator.
        self._node = sorted(
            (rank for rank in ranks if places[rank].node == own.node),
            key=lambda rank: places[rank].local_rank,
        )
        self._by_node = sorted(ranks, key=lambda rank: places[rank].node)

    def line(self, number: int) -> int:
        """Exchanges of one line share communicators, and are carried one after the other."""
        if number == UNCOUNTED:
            return UNCOUNTED
        return number % len(self._channels) if self._strategy.senders == "one" else 0

    def exchange(
        self, number: int, step: int, header: np.ndarray, staging: Staging, before: Request | None
    ) -> Waits:
        """Sums what is staged, after the exchange ``before``; returns the header and bytes sent."""
        channels = self._carrying(number)
        total = yield from operations.greet(
            self._greetings,
            staging.fingerprint,
            number,
            step,
            header,
            self._group(channels[0].carrier),
            self._topology.describe,
        )
        # One after the other on a communicator: exchanges of several fragments may be in flight,
        # and their messages look alike; those of one that has failed may still arrive.
        yield from after(before)
        sent = yield from side_by_side(
            self._carry(channel, staging, index, len(channels))
            for index, channel in enumerate(channels)
        )
        return total, sent

    def meeting(self, number: int) -> Any:
        """The communicator over which all agree that an exchange has ended."""
        return self._carrying(number)[0].group

    def communicators(self) -> list[Any]:
        """All of them."""
        channels = self._channels + self._aside
        joined = [comm for channel in channels for comm in (channel.group, channel.node)]
        return [self._greetings, *filter(None, joined)]

    def _carrying(self, number: int) -> list[Channel]:
        """The channels over which an exchange goes, a part over each."""
        if number == UNCOUNTED:
            return self._aside
        if self._strategy.senders == "all":
            return self._channels
        index = number % len(self._channels)
        return self._channels[index : index + 1]

    def _carry(self, channel: Channel, staging: Staging, index: int, parts: int) -> Waits:
        """Sums a part of what is staged over the nodes, and hands it to the node's processes."""
        sent = 0
        if channel.group is not None:
            members = self._group(self._topology.local_rank)
            sent = yield from operations.in_world_ranks(
                operations.sum_staged(channel.group, staging, self._strategy, index, parts),
                members,
            )
        if channel.node is not None:
            nodes = self._topology.num_nodes
            sums = [
                sums[place]
                for _, sums in staging.pairs
                for place in part(shards(len(sums), nodes), index, parts)
            ]
            yield from operations.in_world_ranks(
                operations.broadcast(channel.node, sums, channel.carrier), self._node
            )
        return sent

    def _group(self, local_rank: int) -> list[int]:
        """The processes of a local rank, one per node."""
        places = self._topology.places
        return [rank for rank in self._by_node if places[rank].local_rank == local_rank]


def _channels(topology: Topology) -> list[Channel]:
    several = topology.processes_per_node > 1
    return [
        Channel(group, topology.node_communicator() if several else None, index * several)
        for index, group in enumerate(topology.group_communicators())
    ]
