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
from jdaso.exchange.transport.operation import Operation, interleave
from jdaso.exchange.transport.request import Request, completed
from jdaso.exchange.transport.watch import Watch


class IndexCommunicators(NamedTuple):
    """The communicators that transfer the exchanges, or their parts, of one local index."""

    nodes: Comm | None  # one process of each node; None in one that does not send for this index
    within_node: Comm | None  # the processes of this node; None if a node is one process
    sender: int  # local rank of the processes that send for this index


class ExchangeCommunicators:
    """The communicators of all local indices. Creating them is collective over all processes."""

    def __init__(self, topology: Topology, options: collectives.AllReduceOptions):
        self._topology = topology
        self._options = options
        self._by_index = _by_index(topology, topology.num_local_devices)
        # A consensus must not receive messages of exchanges that are in flight.
        self._consensus = _by_index(topology, 1)
        self.handshakes = topology.duplicate_comm()
        # World ranks of the processes with each local rank, in the order of nodes.
        places = np.array(topology.placements)
        by_node = np.lexsort((places[:, 1], places[:, 0]))
        self._members = by_node.reshape(-1, topology.processes_per_node).T

    def queue(self, number: int) -> int:
        """The queue of an exchange. Exchanges of a queue share communicators and run in order."""
        if number == UNCOUNTED:
            return UNCOUNTED
        return number % len(self._by_index) if self._options.senders == "one" else 0

    def agreement(self, number: int) -> Comm | None:
        """The communicator over which all processes agree that an exchange is complete."""
        return self._used_by(number)[0].nodes

    def all(self) -> list[Comm]:
        by_index = self._by_index + self._consensus
        nested = [comm for index in by_index for comm in (index.nodes, index.within_node)]
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
        used, topology = self._used_by(number), self._topology
        content = watch.content(number, header, staging, topology.local_rank)
        total, records = yield from handshake(
            self.handshakes,
            staging.layout.fingerprint,
            number,
            step,
            header,
            self._members[used[0].sender],
            self._members[:, topology.node],
            topology.describe,
            content,
        )
        watch.compare(number, records["content"][self._members], topology, staging.layout)
        contributions = records["header"][self._members[used[0].sender], 0]
        watch.check_contributions(number, contributions, staging.layout)
        yield from completed(before)
        members = float(total[0])
        if topology.joined:
            sent = yield from self._sum_shards(used[0], staging, number, members)
        else:
            sent = yield from interleave(
                self._sum_part(communicators, staging, index, len(used))
                for index, communicators in enumerate(used)
            )
            yield from collectives.widen_staged(staging, topology.node, topology.num_nodes)
        finite = staging.finite()  # the same on all nodes, as the sums are
        if topology.joined:  # other processes of the node have other shards
            assert used[0].within_node is not None
            finite = not (yield from collectives.any_true(used[0].within_node, not finite))
        elif staging.layout.relative:
            yield from collectives.subtract_own(staging, members)
        watch.check_sums(number, bool(finite), members, staging)
        total[FINITE], total[OWN] = finite, header[0] > 0
        return total, sent

    def _used_by(self, number: int) -> list[IndexCommunicators]:
        """The communicators of an exchange. Each of them transfers one part."""
        if number == UNCOUNTED:
            return self._consensus
        index = self.queue(number)
        return self._by_index if self._options.senders == "all" else [self._by_index[index]]

    def _sum_part(
        self, communicators: IndexCommunicators, staging: StagingBuffers, index: int, parts: int
    ) -> Operation:
        """Sums one part over the nodes, and sends the sums to all processes of this node."""
        sent = 0
        if communicators.nodes is not None:
            sent = yield from collectives.sum_staged(
                communicators.nodes, staging, self._options, index, parts
            )
        if communicators.within_node is not None:
            topology = self._topology
            yield from collectives.share_sums(
                communicators.within_node,
                staging,
                communicators.sender,
                topology.node,
                topology.num_nodes,
                index,
                parts,
            )
        return sent

    def _sum_shards(
        self,
        communicators: IndexCommunicators,
        staging: StagingBuffers,
        number: int,
        members: float,
    ) -> Operation:
        """Sums the shards that this process sends, and passes the sums on to the other holders."""
        nodes, within_node, _ = communicators
        assert nodes is not None
        assert within_node is not None
        topology, sent = self._topology, 0
        for holders, group in staging.by_holders():
            root = sender(holders, number)
            if root == topology.local_rank:
                sent += yield from collectives.sum_staged(nodes, group, self._options)
                yield from collectives.widen_staged(group, topology.node, topology.num_nodes)
                if staging.layout.relative:
                    yield from collectives.subtract_own(group, members)
            yield from collectives.pass_on(within_node, group, root, {*holders} - {root})
        return sent


def _by_index(topology: Topology, count: int) -> list[IndexCommunicators]:
    if topology.joined:  # each process has one index and sends for it alone
        own = next(filter(None, topology.group_communicators()))
        return [IndexCommunicators(own, topology.node_communicator(), 0)]
    several = topology.processes_per_node > 1
    return [
        IndexCommunicators(
            nodes, topology.node_communicator() if several else None, index * several
        )
        for index, nodes in enumerate(topology.group_communicators(count))
    ]
