"""Closing an exchange frees every communicator that creating it has made."""

import dataclasses

import pytest

import jdaso
from jdaso.cluster.topology import Placement
from jdaso.exchange.transport.mpi_transport import Membership

NODES, PER_NODE = 2, 2


class Comm:
    """A communicator. ``made`` are those that were made from it and not yet freed."""

    def __init__(self, made):
        self.made = made

    def Dup(self):
        self.made.append(Comm(self.made))
        return self.made[-1]

    def Split(self, color, key):
        return self.Dup()

    def Free(self):
        self.made.remove(self)


@pytest.mark.parametrize("local_rank", range(PER_NODE))
def test_all_communicators_of_several_processes_per_node_are_freed(local_rank):
    alone, made = jdaso.discover_topology(), []
    topology = dataclasses.replace(
        alone,
        rank=local_rank,
        processes=NODES * PER_NODE * alone.processes,
        placements=tuple(Placement(node, i) for node in range(NODES) for i in range(PER_NODE)),
        processes_per_node=PER_NODE,
        devices=alone.devices[:1],
        comm=Comm(made),
    )
    membership = Membership(topology, chunk_bytes=16)
    assert made
    membership.free()
    assert not made
