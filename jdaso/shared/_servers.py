"""A server with its slaves as a topology of its own."""

from __future__ import annotations

import dataclasses

from jdaso._layout import Place
from jdaso.shared._window import check_servers
from jdaso.topology import Topology


def server_group(topology: Topology, num_servers: int) -> Topology:
    """The group of processes that this one averages gradients with (passm Sec. 4).

    "A single GPU hosts multiple concurrent processes working as asynchronous PSs. Each PS can have
    multiple slaves": rank r belongs to server ``r mod num_servers``, and is the server itself if
    r is below ``num_servers``. Collective over all processes.

    Args:
        topology: from :func:`jdaso.discover_topology`.
        num_servers: how many there are; it divides the number of processes.

    Returns:
        A topology of the server, which is node 0, and its slaves. An exchange over it is the
        ``group`` of :func:`assm`, :func:`passm` and :func:`passm_plus`.

    Raises:
        ValueError: for a number of servers that does not divide that of processes.

    >>> import jdaso
    >>> group = server_group(jdaso.discover_topology(), num_servers=1)
    >>> jdaso.mpi_exchange(group).num_nodes
    1
    """
    check_servers(num_servers, len(topology.processes))
    if topology.comm is None:
        return topology
    server = topology.rank % num_servers
    members = topology.processes[server::num_servers]
    return dataclasses.replace(
        topology,
        rank=topology.rank // num_servers,
        # Which say what they are of all: errors name them so, and the heartbeat knows them so.
        processes=members,
        places=tuple(Place(node=i, local_rank=0) for i in range(len(members))),
        processes_per_node=1,
        comm=topology.comm.Split(server, topology.rank),
    )
