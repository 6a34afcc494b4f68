"""A center over MPI: a thread of node 0 is the server, and every process is a worker."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.center import frames
from jdaso.center.server import HostedServer, Record, start_server
from jdaso.center.types import (
    ONLY_WITH_THE_SERVER,
    Center,
    CenterState,
    ServerRule,
    map_state,
    no_broadcast,
)
from jdaso.center.worker import Worker
from jdaso.cluster.ending import DeathPolicy
from jdaso.cluster.topology import Topology
from jdaso.core.exchange import Exchange, changed
from jdaso.core.tree import check_finite, is_placeholder, outline, split, widened
from jdaso.core.types import Number, PyTree
from jdaso.core.validation import check_number
from jdaso.exchange.host.layout import Shardings
from jdaso.exchange.host.program import Program, ProgramLeaves, is_uncounted
from jdaso.exchange.host.slots import use_native

_HEARTBEATS = 6  # within the time after which a silent worker is gone
_POLL_SECONDS = 0.05


def mpi_center(
    topology: Topology,
    timeout: float = 600.0,
    gone_after: float = 30.0,
    native: bool | None = None,
    record: Record | None = None,
) -> Center:
    """Workers are MPI processes, each with its own clock, and a thread of node 0 is the server.

    The server handles messages one at a time, in the order of their arrival, and replies to each.
    The program sends a message and, with a delay, continues training until the reply is due. Node 0
    is a worker as well. If it ends its training first, its server continues until the others end.

    - A worker may end early, also by an exception, or fall behind. The others do not wait for it.
      At exit, it waits until all workers have ended, because MPI requires that.
    - If a worker is killed, node 0 logs it and the others continue, provided that the launcher
      does not stop them: use ``srun`` without ``-K``, or MPICH's ``mpiexec
      -disable-auto-cleanup`` with a shell in between, see the page of the center in the
      documentation. MPI cannot be finalized after that. All others therefore exit abruptly at the
      end, with status 0, or 1 after an exception, and an argument of ``sys.exit`` is ignored. Node
      0 must survive.
    - A worker that starts late calls ``join`` at that time, and starts from the current center.

    This function is collective over all processes; ``join`` and all later calls are not. A center
    serves one optimizer. Make another center for another optimizer.

    Args:
        topology: The result of :func:`jdaso.discover_topology`, with one process per node.
        timeout: Seconds after which a request without a reply is an error. The call of
            ``mpi_center`` also waits so long for the other processes.
        gone_after: Seconds of silence after which a worker counts as gone. A thread of each worker
            sends heartbeats, also while the worker computes.
        native: As for :func:`jdaso.mpi_exchange`.
        record: ``(worker, message)``, called in order by the server's thread on node 0 for each
            message that it applies. These messages and the rule determine all centers, bit for bit.

    Returns:
        A :class:`jdaso.center.Center`. ``report()`` contains this worker's exchanges, bytes sent
        and seconds. On node 0 it also contains ``workers``, the exchanges of each, and ``ended``,
        ``failed`` and ``gone``.

    Raises:
        ValueError: without MPI, for several processes per node, for numbers that are not positive,
            or for ``native=True`` where compiled code cannot be used.
        JdasoError: If a process does not call ``mpi_center`` within ``timeout``. In ``join`` and
            ``update``, if the worker's parameters or arguments are not those of the center, or if
            the server does not reply.

    >>> import jdaso
    >>> topology = jdaso.discover_topology()
    >>> center = jdaso.center.mpi_center(topology)  # doctest: +SKIP
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.center.async_easgd(center, 16))  # doctest: +SKIP
    >>> params = center.join(params)  # doctest: +SKIP
    """
    check_number("timeout", timeout, above=True)
    check_number("gone_after", gone_after, above=True)
    if topology.comm is None:
        raise ValueError(
            "mpi_center requires MPI, and mpi4py cannot be imported: pip install mpi4py, or use "
            "jdaso.center.simulated_center."
        )
    if topology.processes_per_node > 1:
        raise ValueError(
            f"mpi_center needs one process per node, got {topology.processes_per_node}: a node is "
            "one worker. Use discover_topology(processes_per_node=1)."
        )
    native = use_native(native, topology.devices)
    topology.group.barrier("the creation of a center", timeout)  # duplicate_comm has no deadline
    comm = topology.duplicate_comm()
    hosted = None
    if topology.rank == frames.SERVER:
        hosted = start_server(topology, comm, gone_after, record)
    # Only the server handles deaths, but all processes tolerate them.
    on_death = hosted.liveness.set_died if hosted else lambda rank: None
    topology.follow(DeathPolicy(frozenset({frames.SERVER}), on_death))
    worker = Worker(topology, comm, timeout, gone_after / _HEARTBEATS)
    shardings = Shardings(None, topology.mesh)
    program = Program(worker.table, native, shardings, worker.abort_on_error)
    return _MpiCenter(topology.num_nodes, worker, program, hosted)


def _check_start(number: Number, *_: Any) -> None:
    if is_uncounted(number):
        raise ValueError(ONLY_WITH_THE_SERVER)


class _MpiCenter(Center):
    def __init__(
        self, num_workers: int, worker: Worker, program: Program, hosted: HostedServer | None
    ):
        super().__init__(num_workers)
        self._worker, self._program, self._hosted = worker, program, hosted
        self._rule: ServerRule | None = None

    def make_exchange(self, rule: ServerRule) -> Exchange:
        if self._rule is not None:
            raise ValueError(
                f"this center already serves '{self._rule.name}': make a center for each optimizer."
            )
        _check_keeps_dtypes(rule)
        self._rule, self._worker.rule_name = rule, rule.name
        if self._hosted is not None:
            self._hosted.server.rule = rule

        def init(params: PyTree, sharded: bool = True) -> jax.Array:
            if not is_placeholder(params):
                self._worker.table.restart()
            return jnp.zeros((), jnp.int32)

        return changed(
            Exchange(self.num_workers),
            init=init,
            bind=lambda names, leaves: ProgramLeaves(self._program, (), leaves, _check_start),
            broadcast=no_broadcast,
            may_pickle=False,
        )

    def join(self, params: PyTree, saved: CenterState | None = None) -> PyTree:
        if self._rule is None:
            raise ValueError(
                "there is no optimizer for this center yet: make one, such as "
                "jdaso.center.async_easgd(center, ...), before you call join."
            )
        check_finite("center.join", "parameter", params, 1)
        xs, where = split(jax.tree.map(jnp.asarray, params))
        leaves = state = None
        if self._hosted is not None:
            leaves = [np.asarray(x) for x in widened(xs)]
            state = None if saved is None else _to_lists(saved)
        request = (self._rule.name, outline(params), leaves, state)
        center = self._worker.ask(frames.JOIN, request)
        return where(
            [jax.device_put(c.astype(x.dtype), x.sharding) for x, c in zip(xs, center, strict=True)]
        )

    def read(self, params: PyTree) -> CenterState:
        state = frames.to_state(self._worker.ask(frames.READ, outline(params)))
        return map_state(split(params)[1], state)

    def write(self, state: CenterState) -> None:
        self._worker.ask(frames.WRITE, _to_lists(state))

    def wait(self) -> None:
        while self._hosted is not None and self._hosted.liveness.active() - {frames.SERVER}:
            time.sleep(_POLL_SECONDS)

    def report(self) -> dict[str, Any]:
        own = self._worker.table.report()
        if self._hosted is None:
            return own
        server, liveness = self._hosted
        return {
            **own,
            "workers": dict(server.exchanges),
            "ended": sorted(liveness.ended - liveness.failed),
            "failed": sorted(liveness.failed),
            "gone": sorted(liveness.gone),
        }


def _to_lists(state: CenterState) -> CenterState:
    """A state with lists of leaves, as on the server, in place of trees."""
    lists = map_state(lambda tree: [np.asarray(x) for x in split(tree)[0]], state)
    return lists._replace(clock=np.int32(state.clock))


def _check_keeps_dtypes(rule: ServerRule) -> None:
    """Raises ValueError for a rule that uses JAX, or that changes the dtypes of the state.

    JAX must not run in the server's thread. A client may write back a state that it has read, and
    the server rejects changed dtypes.
    """
    leaves = [np.ones(1, np.float32)]
    first = rule.init(leaves)
    updated, reply = rule.update(first, leaves)
    before = jax.tree.leaves((first, first.center))
    for old, new in zip(before, jax.tree.leaves((updated, reply)), strict=True):
        if not isinstance(new, np.ndarray | np.generic) or np.asarray(new).dtype != old.dtype:
            raise ValueError(
                f"the rule '{rule.name}' returned JAX arrays or changed a dtype: make its "
                "hyperparameters Python floats."
            )
