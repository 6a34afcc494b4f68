"""A centre over MPI: a thread of node 0 serves it, workers are processes with own clocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdaso._base import Exchange, PyTree
from jdaso._center import Center, CenterState, Rule, mapped, no_broadcast
from jdaso._checks import check_number
from jdaso._leaves import outline, split, widened
from jdaso.center import _protocol as protocol
from jdaso.center._client import Client
from jdaso.center._leaving import Departure, end_alone, ending_alone, outlive, stay
from jdaso.center._line import Line
from jdaso.center._presence import Presence
from jdaso.center._server import Server
from jdaso.center._serving import serving
from jdaso.exchange._messages import Waits
from jdaso.exchange._native import chosen
from jdaso.exchange._program import Program
from jdaso.exchange._progress import Progress
from jdaso.topology import Topology

# Signs of life within the time after which a silent worker is gone.
_BEATS = 6
_PAUSE_SECONDS = 0.05


def mpi_center(
    topology: Topology,
    timeout: float = 600.0,
    gone_after: float = 30.0,
    native: bool | None = None,
    record: Callable[[int, list[np.ndarray]], None] | None = None,
) -> Center:
    """Workers are MPI processes, each with a clock of its own; a thread of node 0 is the server.

    A message is taken as a whole, in the order of arrival, and answered. It is sent from inside
    the program and, with a delay, training goes on until the reply is due. Node 0 is a worker,
    too; one that joins and then ends is a server only, as long as others train.

    - A worker may end earlier than others, also by an exception, or fall behind: nobody waits for
      it. At exit it waits until all have ended, as MPI wants.
    - One that is killed is reported by node 0, and ends nobody, from now on, if the launcher
      lets the others live: ``srun`` without ``-K``, or MPICH's ``mpiexec -disable-auto-cleanup``
      with a shell between, see README. Node 0 cannot be spared. MPI cannot be finalized without
      it, so all others end at once when they are done, with status 0, or 1 after an exception:
      what they give to ``sys.exit`` is lost then.
    - One that starts to train late calls ``join`` then, and starts from the centre.

    Collective over all processes, ``join`` and everything after it is not. One centre serves one
    optimizer: make another for another.

    Args:
        topology: from :func:`jdaso.discover_topology`, with one process per node.
        timeout: seconds after which a question that the server has not answered is an error.
        gone_after: seconds of silence after which a worker counts as gone. A thread of each gives
            signs of life, also while the worker computes.
        native: as for :func:`jdaso.mpi_exchange`.
        record: ``(worker, message)``, on node 0, called by the server's thread for each message
            it takes, in their order; from these and the rule follows every centre, bit for bit.

    Returns:
        A :class:`jdaso.Center`. ``report()`` has this worker's exchanges, bytes sent and seconds,
        and on node 0 ``workers``, the exchanges of each, ``ended``, ``failed`` and ``gone``.

    Raises:
        ValueError: without MPI, for several processes per node, numbers that are not positive, or
            ``native=True`` where compiled copies cannot be used.
        JdasoError: in ``join`` and ``update``, if the worker's parameters or arguments are not
            those of the centre, or the server does not answer.

    >>> import jdaso
    >>> topology = jdaso.discover_topology()
    >>> center = jdaso.mpi_center(topology)  # doctest: +SKIP
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.async_easgd(center, 16))  # doctest: +SKIP
    >>> params = center.join(params)  # doctest: +SKIP
    """
    check_number("timeout", timeout, above=True)
    check_number("gone_after", gone_after, above=True)
    if topology.comm is None:
        raise ValueError("mpi_center needs MPI: pip install mpi4py, or use simulated_center.")
    if topology.processes_per_node > 1:
        raise ValueError(
            f"mpi_center needs one process per node, got {topology.processes_per_node}: a node is "
            "one worker. Use discover_topology(processes_per_node=1)."
        )
    native = chosen(native, topology.devices[0].platform)
    comm = topology.comm.Dup()
    serves = topology.rank == protocol.SERVER
    if serves:
        server = Server(topology.num_nodes, topology.describe, record)
        presence = Presence(topology.num_nodes, topology.describe, gone_after, time.monotonic())
        if topology.heartbeat is not None:
            topology.heartbeat.outlive(presence.dies, silence=True)
        _serve(topology, comm, server, presence)
        leave: Callable[[Sequence[int]], None] = stay
        end: Callable[[str], None] = topology.end_all
        failed: Callable[[], bool] = bool  # which would end all
    else:
        (leave, failed), end = ending_alone(topology), end_alone
    outlive()
    line = Line(topology, comm, timeout, gone_after / _BEATS, end, leave, failed)
    client = Client(topology, line, end)
    program = Program(client, native, topology.devices)
    served: list[Rule] = []

    def serve(rule: Rule) -> Exchange:
        if served:
            raise ValueError(f"this centre serves '{served[0].name}' already; make another.")
        _check_plain(rule)
        served.append(rule)
        client.begin(rule.name)
        if serves:
            server.rule = rule

        def init(params: PyTree) -> jax.Array:
            if jax.tree.leaves(params):  # optax.tree_map_params calls init on an empty tree
                client.start_anew()
            return jnp.zeros((), jnp.int32)

        return Exchange(topology.num_nodes, None, init, program.start, program.finish, no_broadcast)

    def join(params: PyTree, saved: CenterState | None = None) -> PyTree:
        if not served:
            raise ValueError("make the optimizer, jdaso.async_easgd(center, ...), before you join.")
        xs, where = split(jax.tree.map(jnp.asarray, params))
        leaves = [np.asarray(x) for x in widened(xs)] if serves else None
        state = _flat(saved) if serves and saved is not None else None
        asked = (served[0].name, outline(params), leaves, state)
        arrived = protocol.heard(client.ask(protocol.JOIN, asked))
        return where(
            [
                jax.device_put(c.astype(x.dtype), x.sharding)
                for x, c in zip(xs, arrived, strict=True)
            ]
        )

    def read(params: PyTree) -> CenterState:
        state = protocol.heard_state(client.ask(protocol.READ, outline(params)))
        _, where = split(params)
        return mapped(where, state)

    def write(state: CenterState) -> None:
        client.ask(protocol.WRITE, _flat(state))

    def wait() -> None:
        while serves and presence.left() - {protocol.SERVER}:
            time.sleep(_PAUSE_SECONDS)

    def report() -> dict[str, Any]:
        own = client.report()
        if not serves:
            return own
        return {
            **own,
            "workers": dict(server.exchanges),
            "ended": sorted(presence.ended - presence.failed),
            "failed": sorted(presence.failed),
            "gone": sorted(presence.gone),
        }

    return Center(
        topology.num_nodes,
        in_turns=False,
        serve=serve,
        join=join,
        read=read,
        write=write,
        wait=wait,
        report=report,
    )


def _flat(state: CenterState) -> CenterState:
    """A state whose trees are lists of leaves, as the server keeps it."""
    return mapped(_arrays, state)._replace(clock=np.int32(state.clock))


def _arrays(tree: PyTree) -> list[np.ndarray]:
    return [np.asarray(x) for x in split(tree)[0]]


def _check_plain(rule: Rule) -> None:
    """Raises ValueError for a rule whose numbers are JAX's, or make a centre of another dtype.

    The server's thread must not use JAX, and what it has read must be what can be written.
    """
    one = [np.ones(1, np.float32)]
    first = rule.init(one)
    moved, reply = rule.update(first, one)
    before = jax.tree.leaves((first, first.center))
    for old, new in zip(before, jax.tree.leaves((moved, reply)), strict=True):
        if not isinstance(new, np.ndarray | np.generic) or np.asarray(new).dtype != old.dtype:
            raise ValueError(
                f"over MPI a centre needs plain Python numbers, got those of JAX or NumPy in "
                f"'{rule.name}'."
            )


def _serve(topology: Topology, comm: Any, server: Server, presence: Presence) -> None:
    """Starts the server's thread, which ends after all workers."""

    def guarded() -> Waits:
        try:
            yield from serving(comm, server, presence)
        except Exception as error:
            # Nobody may wait for a server that is no more.
            topology.end_all(f"the centre failed: {type(error).__name__}: {error}")
            raise

    farewell = Departure(topology, presence)
    Progress(topology, math.inf, farewell, topology.end_all).submit(guarded(), "the centre")
