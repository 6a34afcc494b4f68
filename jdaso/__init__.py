"""Train JAX models on many nodes with the network between them hidden."""

from jdaso import center as center
from jdaso import checkpoint as checkpoint
from jdaso import passm as passm
from jdaso import perf as perf
from jdaso import testing as testing
from jdaso._apply_updates import apply_updates as apply_updates
from jdaso._base import Arrival as Arrival
from jdaso._base import Exchange as Exchange
from jdaso._base import Flown as Flown
from jdaso._base import JdasoError as JdasoError
from jdaso._base import Merge as Merge
from jdaso._base import Plan as Plan
from jdaso._base import Schedule as Schedule
from jdaso._center import Center as Center
from jdaso._center import CenterState as CenterState
from jdaso._consensus import broadcast as broadcast
from jdaso._consensus import consensus as consensus
from jdaso._drain import drain as drain
from jdaso._engine import averaging as averaging
from jdaso._heartbeat import EXIT_NODE_LOST as EXIT_NODE_LOST
from jdaso._interruption import EXIT_TRY_AGAIN as EXIT_TRY_AGAIN
from jdaso._interruption import Interruption as Interruption
from jdaso._memory import chain as chain
from jdaso._metrics import Metrics as Metrics
from jdaso._metrics import drift as drift
from jdaso._metrics import metrics as metrics
from jdaso._state import AveragingState as AveragingState
from jdaso._state import averaging_state as averaging_state
from jdaso._subject import AFTER as AFTER
from jdaso._subject import BEFORE as BEFORE
from jdaso._subject import GRADIENTS as GRADIENTS
from jdaso._subject import Subject as Subject
from jdaso.algorithms._admm import admm as admm
from jdaso.algorithms._allreduce_gradients import allreduce_gradients as allreduce_gradients
from jdaso.algorithms._async_easgd import async_eamsgd as async_eamsgd
from jdaso.algorithms._async_easgd import async_easgd as async_easgd
from jdaso.algorithms._dasgd import dasgd as dasgd
from jdaso.algorithms._daso import daso as daso
from jdaso.algorithms._diloco import diloco as diloco
from jdaso.algorithms._downpour import adownpour as adownpour
from jdaso.algorithms._downpour import downpour as downpour
from jdaso.algorithms._downpour import mvadownpour as mvadownpour
from jdaso.algorithms._eamsgd import eamsgd as eamsgd
from jdaso.algorithms._eamsgd import eamsgd_eval_params as eamsgd_eval_params
from jdaso.algorithms._easgd import easgd as easgd
from jdaso.algorithms._easgd import easgd_center as easgd_center
from jdaso.algorithms._local_sgd import local_sgd as local_sgd
from jdaso.algorithms._mdownpour import mdownpour as mdownpour
from jdaso.center._mpi import mpi_center as mpi_center
from jdaso.center._simulation import simulated_center as simulated_center
from jdaso.exchange._axis import axis_exchange as axis_exchange
from jdaso.exchange._axis import single_exchange as single_exchange
from jdaso.exchange._mpi import mpi_exchange as mpi_exchange
from jdaso.exchange._mpi4jax import mpi4jax_exchange as mpi4jax_exchange
from jdaso.exchange._mpi4jax import process_mean as process_mean
from jdaso.local import local_value_and_grad as local_value_and_grad
from jdaso.local import pmean as pmean
from jdaso.local import use_virtual_devices as use_virtual_devices
from jdaso.schedules import PHASES as PHASES
from jdaso.schedules import by_step as by_step
from jdaso.schedules import constant as constant
from jdaso.schedules import cycling as cycling
from jdaso.schedules import linear as linear
from jdaso.topology import Topology as Topology
from jdaso.topology import discover_topology as discover_topology

__all__ = [
    "AFTER",
    "BEFORE",
    "EXIT_NODE_LOST",
    "EXIT_TRY_AGAIN",
    "GRADIENTS",
    "PHASES",
    "Arrival",
    "AveragingState",
    "Center",
    "CenterState",
    "Exchange",
    "Flown",
    "Interruption",
    "JdasoError",
    "Merge",
    "Metrics",
    "Plan",
    "Schedule",
    "Subject",
    "Topology",
    "admm",
    "adownpour",
    "allreduce_gradients",
    "apply_updates",
    "async_eamsgd",
    "async_easgd",
    "averaging",
    "averaging_state",
    "axis_exchange",
    "broadcast",
    "by_step",
    "center",
    "chain",
    "checkpoint",
    "consensus",
    "constant",
    "cycling",
    "dasgd",
    "daso",
    "diloco",
    "discover_topology",
    "downpour",
    "drain",
    "drift",
    "eamsgd",
    "eamsgd_eval_params",
    "easgd",
    "easgd_center",
    "linear",
    "local_sgd",
    "local_value_and_grad",
    "mdownpour",
    "metrics",
    "mpi4jax_exchange",
    "mpi_center",
    "mpi_exchange",
    "mvadownpour",
    "passm",
    "perf",
    "pmean",
    "process_mean",
    "simulated_center",
    "single_exchange",
    "testing",
    "use_virtual_devices",
]
