"""The topology of a parameter server and its slaves."""

from jdaso.cluster.topology import Topology
from jdaso.passm.mpi_window import check_num_servers


def server_group(topology: Topology, num_servers: int) -> Topology:
    """The group of processes that this one averages gradients with (passm Sec. 4).

    "A single GPU hosts multiple concurrent processes working as asynchronous PSs. Each PS can have
    multiple slaves": rank r belongs to server ``r mod num_servers``, and is the server itself if
    r is below ``num_servers``. Collective over all processes.

    Args:
        topology: From :func:`jdaso.discover_topology`.
        num_servers: Number of servers. It divides the number of processes.

    Returns:
        A topology of the server, which is node 0, and its slaves. Pass an exchange over it as
        ``group`` to :func:`assm`, :func:`passm` and :func:`passm_plus`.

    Raises:
        ValueError: If ``num_servers`` does not divide the number of processes.

    >>> import jdaso
    >>> group = server_group(jdaso.discover_topology(), num_servers=1)
    >>> jdaso.mpi_exchange(group).num_nodes
    1
    """
    check_num_servers(num_servers, len(topology.processes))
    if topology.comm is None:
        return topology
    server = topology.rank % num_servers
    ranks = range(server, len(topology.processes), num_servers)
    return topology.restricted_to(ranks, topology.comm.Split(server, topology.rank))
