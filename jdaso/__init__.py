"""Trains JAX models on many nodes and hides the network between them."""

from jdaso import center, checkpoint, cluster, core, exchange, faults, passm, perf, schedules
from jdaso.algorithms.allreduce_gradients import allreduce_gradients
from jdaso.algorithms.dasgd import dasgd
from jdaso.algorithms.daso import daso
from jdaso.algorithms.diloco import diloco, diloco_anchor
from jdaso.algorithms.eamsgd import eamsgd, eamsgd_eval_params
from jdaso.algorithms.easgd import easgd, easgd_center
from jdaso.algorithms.local_sgd import local_sgd
from jdaso.cluster.local_devices import local_value_and_grad
from jdaso.cluster.topology import Topology, discover_topology
from jdaso.core.chain import apply_gradients, chain, drain
from jdaso.core.consensus import broadcast, consensus, drift
from jdaso.core.exchange import Exchange
from jdaso.core.state import metrics
from jdaso.core.types import JdasoError, Schedule
from jdaso.exchange.axis import axis_exchange, single_exchange
from jdaso.exchange.mpi import mpi_exchange
from jdaso.schedules import constant, cycling

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022  grouped by purpose
    # Algorithms. Put each last in a chain, allreduce_gradients first, and eamsgd alone.
    "daso",
    "dasgd",
    "local_sgd",
    "easgd",
    "eamsgd",
    "diloco",
    "allreduce_gradients",
    "diloco_anchor",
    "easgd_center",
    "eamsgd_eval_params",
    # Exchanges, which send arrays between nodes.
    "mpi_exchange",
    "axis_exchange",
    "single_exchange",
    # The training step, and functions before and after it.
    "chain",
    "apply_gradients",
    "local_value_and_grad",
    "drain",
    "consensus",
    "broadcast",
    "metrics",
    "drift",
    # Schedules, which decide when to exchange.
    "constant",
    "cycling",
    # The cluster.
    "discover_topology",
    "Topology",
    # Types.
    "Exchange",
    "Schedule",
    "JdasoError",
    # Modules.
    "center",
    "checkpoint",
    "cluster",
    "core",
    "exchange",
    "faults",
    "passm",
    "perf",
    "schedules",
]
