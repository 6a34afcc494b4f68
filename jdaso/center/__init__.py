"""Asynchronous methods: workers exchange messages with a server that keeps the center.

The algorithms are in ``async_easgd``, ``downpour`` and ``admm``, and ``simulation`` has a center
for one process. Over MPI, ``mpi_center`` has the worker of each process, and the ``server`` replies
to its ``frames``.
"""

from jdaso.center.admm import admm
from jdaso.center.async_easgd import async_eamsgd, async_easgd
from jdaso.center.downpour import adownpour, downpour, mdownpour, mvadownpour
from jdaso.center.mpi_center import mpi_center
from jdaso.center.simulation import (
    SimulatedCluster,
    init_cluster,
    random_order,
    read_center,
    round_robin,
    simulated_center,
    take_turns,
)
from jdaso.center.types import Center, CenterState, ServerRule

__all__ = [
    "Center",
    "CenterState",
    "ServerRule",
    "SimulatedCluster",
    "admm",
    "adownpour",
    "async_eamsgd",
    "async_easgd",
    "downpour",
    "init_cluster",
    "mdownpour",
    "mpi_center",
    "mvadownpour",
    "random_order",
    "read_center",
    "round_robin",
    "simulated_center",
    "take_turns",
]
