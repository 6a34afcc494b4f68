"""A center over MPI: a thread of node 0 is the server, and every process is a worker."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.center import frames
from jdaso.center.frames import SERVER, SERVER_TAG, reply_tag
from jdaso.center.server import CenterServer, Record, exit_without, start_server
from jdaso.center.types import (
    ONLY_WITH_THE_SERVER,
    Center,
    CenterExchange,
    CenterState,
    ServerRule,
    map_state,
    reply_header,
)
from jdaso.cluster.ending import DeathPolicy, on_exception
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.topology import Topology
from jdaso.core.exchange import Exchange, changed
from jdaso.core.log import logger
from jdaso.core.tree import check_finite, is_placeholder, outline, split, widened
from jdaso.core.types import JdasoError, Number, PyTree
from jdaso.core.validation import check_number
from jdaso.exchange.host.layout import Shardings
from jdaso.exchange.host.program import Program, ProgramLeaves, is_uncounted
from jdaso.exchange.host.slots import Table, use_native
from jdaso.exchange.transport.progress import Operation, Progress, WaitState

_HEARTBEATS = 6  # within the time after which a silent worker is gone
_POSTED_TWICE = (
    "{} with the center was posted twice in %s: one optimizer state was stepped twice (as "
    "optax.MultiSteps does), or two states share this center. To return to an earlier state, call "
    "tx.init first."
)
_NOT_IN_FLIGHT = (
    "{} with the center is not in flight in %s: the optimizer state is from before a restart, or "
    "was stepped twice. Call jdaso.drain before saving."
)


def mpi_center(
    topology: Topology,
    timeout: float = 600.0,
    gone_after: float = 30.0,
    native: bool | None = None,
    record: Record | None = None,
) -> Center:
    """Workers are MPI processes, each with its own clock, and a thread of node 0 is the server.

    The server handles messages one at a time, in the order of their arrival. Node 0 is a worker as
    well. If it ends its training first, its server continues until the others end.

    A worker may start late, fall behind, or end early, also by an exception. The others do not wait
    for it. At exit, it waits until all workers have ended, because MPI requires that. If a worker
    other than node 0 is killed, the others continue, provided that the launcher lets them; the page
    of the center in the documentation says how. They then exit without finalizing MPI, with status
    0, or 1 after an exception, whatever they pass to ``sys.exit``.

    This function is collective over all processes; ``join`` and all later calls are not. A center
    serves one optimizer.

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
        A :class:`jdaso.center.Center`. Its ``report()`` also contains this worker's exchanges,
        bytes sent and seconds, on all nodes.

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
    server = start_server(topology, comm, gone_after, record) if topology.rank == SERVER else None
    # Only the server handles deaths, but all processes tolerate them.
    on_death = server.died.add if server else lambda rank: None
    topology.follow(DeathPolicy(frozenset({SERVER}), on_death))
    # MPICH's launcher reports a death with SIGUSR1. Only the main thread may set what it does.
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    worker = Worker(topology, comm, timeout, gone_after / _HEARTBEATS)
    shardings = Shardings(None, topology.mesh)
    program = Program(worker.table, native, shardings, worker.progress.abort_on_error)
    return _MpiCenter(topology.num_nodes, worker, program, server)


def _check_start(number: Number, *_: Any) -> None:
    if is_uncounted(number):
        raise ValueError(ONLY_WITH_THE_SERVER)


class _MpiCenter(Center):
    def __init__(
        self, num_workers: int, worker: Worker, program: Program, server: CenterServer | None
    ):
        super().__init__(num_workers)
        self._worker, self._program, self._server = worker, program, server
        self._rule: ServerRule | None = None

    def make_exchange(self, rule: ServerRule) -> Exchange:
        if self._rule is not None:
            raise ValueError(
                f"this center already serves '{self._rule.name}': make a center for each optimizer."
            )
        _check_keeps_dtypes(rule)
        self._rule, self._worker.rule_name = rule, rule.name
        if self._server is not None:
            self._server.rule = rule

        def init(params: PyTree, sharded: bool = True) -> jax.Array:
            if not is_placeholder(params):
                self._worker.table.restart()
            return jnp.zeros((), jnp.int32)

        return changed(
            CenterExchange(self.num_workers),
            init=init,
            bind=lambda names, leaves: ProgramLeaves(self._program, (), leaves, _check_start),
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
        if self._server is not None:
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
        while self._server is not None and self._server.active() - {SERVER}:
            time.sleep(0.05)

    def report(self) -> dict[str, Any]:
        of_all = {} if self._server is None else self._server.report()
        return {**self._worker.table.report(), **of_all}


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


class Worker:
    """The connection of a worker to the server.

    Programs fill and read the slots of ``table``, as those of an exchange. Each slot is a message
    to the server, and its reply are the sums. Only servers and workers use ``comm``.
    """

    def __init__(self, topology: Topology, comm: Comm, timeout: float, heartbeat_seconds: float):
        self._topology, self._comm, self._timeout = topology, comm, timeout
        self._name = topology.describe(topology.rank)
        self.rule_name = ""  # of the rule that the server must apply
        self.table = Table(_POSTED_TWICE % self._name, _NOT_IN_FLIGHT % self._name)
        self._requests = 0
        self._failed = False  # by an exception
        if topology.rank != SERVER:
            on_exception(self._on_exception)
        self._ended = threading.Event()
        self.progress = Progress(topology, timeout, self._announce_exit, self._abort, self.table)
        self.progress.exchanges = self
        self._heartbeats = threading.Thread(
            target=self._send_heartbeats, args=(heartbeat_seconds,), name="jdaso-alive", daemon=True
        )
        self._heartbeats.start()

    def ask(self, kind: int, content: Any) -> Any:
        """Sends a request other than an exchange, and waits for the content of its reply."""
        operation = self._request(kind, content)
        description = f"a request to the center, sent by {self._name},"
        return self.progress.wait(self.progress.submit(operation, description))

    def take(self, slot: Any) -> None:
        """Starts to send a message that a program has posted; called by the progress thread."""
        number, step, memory = slot.number, slot.step, self.table.memory(slot)
        size = sum(vector.nbytes for vector, _ in memory.pairs)
        text = "%s posted exchange %d with the center after step %d, %d bytes"
        logger.debug(text, self._name, number, step, size)
        description = (
            f"exchange {number} with the center, posted by {self._name} after step {step},"
        )
        message = (self.rule_name, slot.header[0] > 0, memory.leaves)

        def exchange() -> Operation:
            reply = yield from self._request(frames.EXCHANGE, message)
            for total, leaf in zip(memory.sums, reply, strict=True):
                total[...] = leaf
            return np.array(reply_header(memory.finite()), np.float32), size

        self.progress.start(slot, exchange(), description, measured=True, call=None)

    def log_completed(self) -> None:
        """Nothing is logged of exchanges that programs have collected."""

    def _request(self, kind: int, content: Any) -> Operation:
        """Sends a frame, waits for the reply, and returns the content of the reply.

        JdasoError if the server refuses. Only one thread at a time advances requests.
        """
        from mpi4py import MPI

        self._requests += 1
        tag, status = reply_tag(self._requests), MPI.Status()
        frame = frames.pack(kind, self._requests, content)
        sent = self._comm.Isend(frame, dest=SERVER, tag=SERVER_TAG)
        while (message := self._comm.Improbe(SERVER, tag, status)) is None:
            sent.Test()
            yield WaitState(frozenset({SERVER}))
        reply = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        received = message.Irecv(reply)
        while not (received.Test() and sent.Test()):
            yield WaitState(frozenset({SERVER}), progressed=True)
        parsed = frames.unpack(reply)
        if parsed.kind == frames.REFUSAL:
            raise JdasoError(parsed.content())
        return parsed.content()

    def _send_heartbeats(self, seconds: float) -> None:
        """Sends heartbeats, also while the program computes."""
        frame = frames.pack(frames.ALIVE, 0)
        while not self._ended.wait(seconds):
            sent = self._comm.Isend(frame, dest=SERVER, tag=SERVER_TAG)
            while not (sent.Test() or self._ended.wait(seconds)):
                pass

    def _abort(self, reason: str) -> None:
        """Ends this worker because it has failed; that of node 0 ends the job."""
        if self._topology.rank == SERVER:
            return self._topology.abort(reason)
        sys.stdout.flush()
        logger.error("%s The others continue.", reason)
        os._exit(1)

    def _on_exception(self, error: BaseException) -> None:
        self._failed = True
        sys.stdout.flush()
        logger.error("%s failed; the others continue.", self._name)

    def _announce_exit(self, progress: Progress) -> None:
        """Tells the server that this worker exits, and waits until all others have ended."""
        while (gone := self._request_end()) is None:
            time.sleep(0.1)
        self._ended.set()
        self._heartbeats.join()
        if self._topology.rank != SERVER:  # the server exits last
            exit_without(self._topology, gone, int(self._failed))

    def _request_end(self) -> list[int] | None:
        """The workers that did not end by themselves; None while other workers are active."""
        operation = self._request(frames.END, self._failed)
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            try:
                next(operation)
            except StopIteration as end:
                return end.value
            time.sleep(1e-3)
        self._abort(
            f"exit without the center: {self._topology.describe(SERVER)} has not replied for "
            f"{self._timeout:g} s."
        )
        return []
