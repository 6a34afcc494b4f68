"""The communicators of exchanges, and the operation that runs an exchange over them."""

from typing import NamedTuple

import numpy as np

from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.topology import Topology
from jdaso.core.exchange import FINITE, OWN, UNCOUNTED
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.layout import sender
from jdaso.exchange.transport import collectives
from jdaso.exchange.transport.handshake import handshake
from jdaso.exchange.transport.operation import Operation
from jdaso.exchange.transport.request import Request, completed
from jdaso.exchange.transport.watch import Watch


class IndexCommunicators(NamedTuple):
    """The communicators that transfer the exchanges of one local index."""

    nodes: Comm  # one process of each node
    within_node: Comm | None  # the processes of this node; None if a node is one process


class ExchangeCommunicators:
    """The communicators of all local indices. Creating them is collective over all processes."""

    def __init__(self, topology: Topology, chunk_bytes: int):
        self._topology = topology
        self._chunk_bytes = chunk_bytes
        # A process of several has the index of its local rank alone.
        self._by_index = [_create(topology) for _ in topology.devices]
        # A consensus must not receive messages of exchanges that are in flight.
        self._consensus = _create(topology)
        self.handshakes = topology.duplicate_comm()
        # World ranks of the processes with each local rank, in the order of nodes.
        places = np.array(topology.placements)
        by_node = np.lexsort((places[:, 1], places[:, 0]))
        self._members = by_node.reshape(-1, topology.processes_per_node).T

    def queue(self, number: int) -> int:
        """The queue of an exchange. Exchanges of a queue share communicators and run in order."""
        return UNCOUNTED if number == UNCOUNTED else number % len(self._by_index)

    def all(self) -> list[Comm]:
        nested = [comm for index in [*self._by_index, self._consensus] for comm in index]
        return [self.handshakes, *filter(None, nested)]

    def exchange(
        self,
        number: int,
        step: int,
        header: np.ndarray,
        staging: StagingBuffers,
        before: Request | None,
        watch: Watch,
    ) -> Operation:
        """Sums a staging buffer after the exchange ``before``; returns the header and bytes sent.

        Exchanges of one communicator run one after the other. The messages of several fragments
        look alike, and messages of a failed exchange may still arrive.
        """
        topology, first = self._topology, self._members[0]
        used = self._consensus if number == UNCOUNTED else self._by_index[self.queue(number)]
        content = watch.content(number, header, staging, topology.local_rank)
        total, records = yield from handshake(
            self.handshakes,
            staging.layout.fingerprint,
            number,
            step,
            header,
            first,
            topology.describe,
            content,
        )
        watch.compare(number, records["content"][self._members], topology, staging.layout)
        watch.check_contributions(number, records["header"][first, 0], staging.layout)
        yield from completed(before)
        members = float(total[0])
        if used.within_node is None:
            sent = yield from self._sum(used.nodes, staging, members)
            finite = staging.finite()  # the same on all nodes, as the sums are
        else:
            sent = yield from self._sum_shards(
                used.nodes, used.within_node, staging, number, members
            )
            # Other processes of the node have other shards.
            lost = not staging.finite()
            finite = not (yield from collectives.any_true(used.within_node, lost))
        watch.check_sums(number, bool(finite), members, staging)
        total[FINITE], total[OWN] = finite, header[0] > 0
        return total, sent

    def _sum(self, nodes: Comm, staging: StagingBuffers, members: float) -> Operation:
        """Sums a staging buffer over the nodes; returns the bytes sent."""
        topology = self._topology
        sent = yield from collectives.sum_staged(nodes, staging, self._chunk_bytes)
        yield from collectives.widen_staged(staging, topology.node, topology.num_nodes)
        if staging.layout.relative:
            yield from collectives.subtract_own(staging, members)
        return sent

    def _sum_shards(
        self,
        nodes: Comm,
        within_node: Comm,
        staging: StagingBuffers,
        number: int,
        members: float,
    ) -> Operation:
        """Sums the shards that this process sends, and passes the sums on to the other holders."""
        sent = 0
        for holders, group in staging.by_holders():
            root = sender(holders, number)
            if root == self._topology.local_rank:
                sent += yield from self._sum(nodes, group, members)
            yield from collectives.pass_on(within_node, group, root, {*holders} - {root})
        return sent


def _create(topology: Topology) -> IndexCommunicators:
    within_node = topology.within_node() if topology.joined else None
    return IndexCommunicators(topology.across_nodes(), within_node)
