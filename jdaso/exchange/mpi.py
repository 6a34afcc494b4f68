"""The exchange between MPI processes, which runs while training computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import get_opaque_trace_state

from jdaso.cluster.topology import Topology
from jdaso.core.block_format import FORMATS
from jdaso.core.exchange import (
    BoundExchange,
    Exchange,
    ExchangeRecord,
    HostState,
    PostedExchange,
    SentLeaf,
    changed,
)
from jdaso.core.log import logger
from jdaso.core.tree import is_placeholder, named_floats, outline
from jdaso.core.types import Leaves, Number, PyTree
from jdaso.core.validation import check_number, check_whole
from jdaso.core.wire import Wire, check_wire
from jdaso.exchange.axis import one_node
from jdaso.exchange.host.layout import Shardings
from jdaso.exchange.host.program import Program, ProgramLeaves, call_back, is_uncounted
from jdaso.exchange.host.slots import use_native
from jdaso.exchange.transport.collectives import different
from jdaso.exchange.transport.mpi_transport import (
    HostCollectives,
    Membership,
    MpiTransport,
    mpi_table,
)
from jdaso.exchange.transport.progress import Progress, run


def mpi_exchange(
    topology: Topology,
    wire: str | None = None,
    chunk_bytes: int = 1 << 26,
    timeout: float = 600.0,
    native: bool | None = None,
    same_bits: bool = True,
    shardings: Any = None,
    name: str = "",
) -> Exchange:
    """An exchange between MPI processes, advanced by a thread while training computes.

    ``post`` copies the parameters to the host and returns. A progress thread exchanges them in
    chunks and sums them in float32. ``collect`` waits for the sums, if necessary, and returns them.
    The call of ``mpi_exchange`` is collective over all processes.

    Each exchange begins with a handshake of a few bytes, in which all processes compare what they
    are about to exchange. It does not count in ``bytes_sent``. The sum then takes two of MPI's
    collectives for each dtype on the wire. Each node receives its shard of all nodes' parameters,
    adds them in the order of nodes, and sends the rounded sum to all. For n bytes on the wire and P
    nodes, it sends ``2 (P-1)/P n`` bytes, the least that an all-reduce can. Sums are rounded twice
    whatever P is, so all exchanges of jdaso compute the same bits. MPI chooses how its collectives
    use the network.

    With L local devices, the communicator of local index ``k mod L`` carries exchange k, with the
    shards of all devices of the process. If a node is several processes that are joined into one
    program, each sends its own shards over the communicator of its local rank.

    Each device of a node copies its own shards to the host and back. A shard that several devices
    hold is sent by one of them, in turn: exchange k is sent by copy k mod n of n. No device gathers
    the leaves of others. This holds under jit, and inside ``shard_map`` over all axes of the mesh,
    where the parameters are a device's shards.

    Make one exchange for each optimizer state, and step each state once. ``optax.MultiSteps``
    steps it at every micro-batch and drops some of the results, which is an error: accumulate
    gradients in the training step instead.

    Args:
        topology: The result of :func:`jdaso.discover_topology`.
        wire: Dtype name that overrides the algorithm's choice: ``float32``, ``bfloat16``,
            ``float16``, ``int8`` or ``float4``.
        chunk_bytes: Largest size of one message in bytes. With many nodes messages are smaller, at
            least 64 KB if the parameters have as much for each node.
        timeout: Least seconds until an exchange that has not completed is an error. The limit is
            the median of the last hundred durations plus 200 median deviations, if that is more.
            It must cover everything that one node does alone, such as an evaluation or a
            checkpoint. A warning comes earlier, after 30 seconds or the median plus 20 deviations.
            The call of ``mpi_exchange`` also waits so long for the other processes.
        native: Whether compiled code copies the parameters, or else host callbacks, which take
            more time and hold the interpreter. None uses compiled code on CPUs and CUDA devices,
            where its bits are those of callbacks (``tests/mpi/test_native.py``, with a simulated
            driver for CUDA; and on one H200, ``bench/README.md``), and warns once otherwise.
        same_bits: Whether it is an error if a center, an anchor, or the parameters of synchronous
            training differ between nodes in any bit. Pass False if the nodes' hardware rounds
            differently. Schedules and steps are compared in any case. The wires ``int8`` and
            ``float4`` require True: their means are sums of differences and would drift apart.
        shardings: How the parameters are sharded over the node's devices: a tree like the
            parameters with a ``PartitionSpec`` or a ``NamedSharding`` for each, one of these for
            all parameters, or a function of path and leaf that returns one. None if they are
            replicated. A ``PartitionSpec`` refers to ``topology.mesh`` with the axis ``"local"``.
            A ``NamedSharding`` has its own mesh, of all devices of the node and with any axes.
        name: What messages call it, such as ``"exchange 3 of 'outer'"``, if there are several. The
            message about nodes that create or use several in different orders then says which.

    Returns:
        A :class:`jdaso.Exchange`, whose state is a :class:`jdaso.core.exchange.HostState`. The host
        keeps exchanges in flight, in two copies of the parameters and some messages, and
        ``posted()`` returns them. ``init`` compares the nodes' parameters, so all nodes must call
        it. With one node, the result is that of :func:`jdaso.single_exchange`.

    Raises:
        ValueError: For an unknown name, a number out of range, or a combination of arguments that
            is excluded above; if ``native=True`` is not available; if the arguments,
            except for ``timeout`` and ``native``, differ between processes; for a mesh of other
            devices. In ``init``, for shardings that do not fit the parameters.
        JdasoError: If jdaso's compiled library is missing. If a process does not call
            ``mpi_exchange`` within ``timeout``. In ``init``, if the nodes' parameters differ in
            structure, shape, dtype or sharding. In ``update``, if nodes are at different steps, if
            a period, delay, schedule state, center or anchor differs, or if a node is missing at
            the deadline.

    >>> import jdaso
    >>> exchange = jdaso.mpi_exchange(jdaso.discover_topology())
    >>> exchange.num_nodes
    1
    """
    if not isinstance(topology, Topology):
        raise ValueError(
            "topology must be what jdaso.discover_topology() returned, got an object of type "
            f"{type(topology).__name__}: call mpi_exchange(topology, ...)."
        )
    wire = check_wire("wire", wire)
    check_number("timeout", timeout, above=True)
    if not (isinstance(name, str) and name.isprintable()) or set(name) & {*"{}%"}:
        raise ValueError(f"name must be a line of text without {{}} and %, got {name!r}.")
    check_whole("chunk_bytes", chunk_bytes, 16)
    if wire in FORMATS:
        _check_feedback(wire, same_bits)
    settings = _Settings(wire, chunk_bytes, same_bits, name)
    sharded = Shardings(shardings, topology.mesh)
    # What only one process may lack comes before it waits for the others.
    native = topology.num_nodes > 1 and use_native(native, topology.devices)
    # From now on the death of a process ends the job, also if a center would go on without it.
    leave = topology.follow()
    # The collectives that follow have no deadline.
    topology.group.barrier("the creation of an exchange", timeout)
    if topology.num_nodes == 1:
        leave()
        alone = _single_node(topology, wire, sharded if shardings is not None else None)
        return changed(alone, name=name)
    _check_same_settings(topology, settings)
    membership = Membership(topology, chunk_bytes, name)
    table = mpi_table(topology, name)
    progress = Progress(topology, timeout, membership.announce_exit, topology.abort, table)
    transport = MpiTransport(membership, progress)
    program = Program(table, native, sharded, progress.abort_on_error)
    collectives = HostCollectives(membership, progress)
    return _MpiExchange(settings, topology, program, transport, collectives, leave)


class _Settings(NamedTuple):
    """The arguments of mpi_exchange that must be the same on all processes."""

    wire: str | None
    chunk_bytes: int
    same_bits: bool
    name: str


def _check_feedback(wire: str, same_bits: bool) -> None:
    """Raises ValueError for arguments with which the wires int8 and float4 cannot be used."""
    if not same_bits:
        raise ValueError(
            f"same_bits=False allows nodes to differ in the last bits, and the wire {wire} sends "
            "differences from a mean that must be equal on all nodes: use the wire bfloat16."
        )


def _check_same_settings(topology: Topology, settings: _Settings) -> None:
    """Raises ValueError on all processes if their arguments differ; collective."""
    assert topology.comm is not None
    own = [repr(value) for value in settings]
    if (pair := run(different(topology.comm, own))) is None:
        return
    ranks, values = list(pair), zip(_Settings._fields, *pair.values(), strict=True)
    name, *given = next(texts for texts in values if texts[1] != texts[2])
    raise ValueError(
        f"{name} must be the same on all processes, got {given[0]} in "
        f"{topology.describe(ranks[0])} and {given[1]} in {topology.describe(ranks[1])}: pass the "
        "same arguments to mpi_exchange."
    )


# Keys, unique in this process. A checkpoint stores the position of the exchange instead.
_numbers = itertools.count()


class _MpiExchange(Exchange):
    """Combines the program's side, the transport, and the host's collectives."""

    compares = True
    may_shard = True
    may_pickle = False

    def __init__(
        self,
        settings: _Settings,
        topology: Topology,
        program: Program,
        transport: MpiTransport,
        collectives: HostCollectives,
        leave: Callable[[], None],
    ):
        # Programs end first. Communicators are in use until the thread has ended.
        at_close = program.close, *transport.at_close(), leave
        super().__init__(topology.num_nodes, settings.wire, settings.name, at_close)
        self.same_bits = settings.same_bits
        self._topology, self._program = topology, program
        self._transport, self._collectives = transport, collectives
        #: The key of each different list of leaves. It says which exchange, and which leaves, an
        #: optimizer state belongs to.
        self._keys: dict[tuple[SentLeaf, ...], int] = {}
        self._means = _OncePerProgram()

    def init(self, params: PyTree, sharded: bool = True) -> HostState:
        texts = self._program.register(params) if sharded else []
        # When these arrays are there, all exchanges before them have been posted.
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
            jax.block_until_ready(params)
        if not is_placeholder(params):
            self._collectives.compare([*outline(params), *texts])
        sent = tuple(
            SentLeaf(name, jnp.shape(leaf), jnp.result_type(leaf))
            for name, leaf in named_floats(params)
        )
        if sent not in self._keys:
            self._keys[sent] = next(_numbers)
        return HostState(jnp.asarray(self._keys[sent], jnp.int32))

    def bind(self, names: Sequence[str], leaves: Leaves) -> BoundExchange:
        return ProgramLeaves(self._program, names, leaves, self._check_start)

    def _check_start(self, number: Number, leaves: Leaves, wire: Wire) -> None:
        for each in {*jax.tree.leaves(wire)} & {*FORMATS}:
            _check_feedback(each, self.same_bits)
        if is_uncounted(number) and isinstance(leaves[0], jax.core.Tracer):
            self._means.check()

    def broadcast(self, names: Sequence[str], leaves: Leaves, root: int) -> Leaves:
        def send(*leaves):
            with self._program.reporting():
                return self._collectives.broadcast(leaves, root)

        mesh = self._program.mesh
        if self._topology.joined:
            specs = ProgramLeaves(self._program, names, leaves).specs

            def on_device(*shards):
                return call_back(send, shards, *shards)

            return mesh.run(("broadcast", root, specs), on_device, specs, list(specs), *leaves)
        if mesh.inside():
            raise ValueError(
                "broadcast inside shard_map would run once on each device: call it outside."
            )
        if not any(isinstance(x, jax.core.Tracer) for x in leaves):
            return send(*leaves)
        shape = jax.ShapeDtypeStruct((), bool)
        arrived, received = io_callback(
            lambda *leaves: (np.bool_(True), send(*leaves)), (shape, leaves), *leaves
        )
        # ``arrived`` is always True. In a program for several devices, the host's result lies on
        # one of them, and this operation with values on all devices distributes it.
        return [jnp.where(arrived, y, x) for y, x in zip(received, leaves, strict=True)]

    @property
    def platform(self) -> str:
        return self._program.mesh.platform

    def finite_leaves(self, leaves: Leaves) -> jax.Array:
        return self._program.finite_leaves(leaves)

    def begin_run(self, total: int | None, params: PyTree, gradients: bool) -> None:
        if not isinstance(jnp.zeros(()), jax.core.Tracer):  # outside jit
            self._program.complete()  # steps of the run before may still post
        self._transport.begin_run(total, gradients)
        if params is not None:
            self._collectives.warn_if_different(params)

    def close(self, abandon: bool = False) -> None:
        if abandon:
            self._transport.abandon()
        super().close()

    def any_node(self, flag: bool) -> bool:
        return self._collectives.any_node(flag)

    def sent_leaves(self, state: HostState) -> list[SentLeaf] | None:
        if isinstance(state.key, jax.core.Tracer):
            return None
        wanted = int(state.key)
        return next((list(sent) for sent, key in self._keys.items() if key == wanted), None)

    def posted(self) -> dict[int, PostedExchange]:
        return self._transport.posted()

    def report(self) -> dict[str, float]:
        return self._transport.report()

    def history(self) -> list[ExchangeRecord]:
        return self._transport.history()

    def post_again(
        self, posted: dict[int, PostedExchange], sent: dict[int, list[SentLeaf]]
    ) -> None:
        self._transport.post_again(
            {n: (self._program.posted_layout(sent[n], each), each) for n, each in posted.items()}
        )


class _OncePerProgram:
    """Refuses a second consensus in one compiled program.

    The calls have no order in it, so nodes could sum different trees. It is an object of its own
    because the copies that :func:`jdaso.core.exchange.changed` makes share it.
    """

    def __init__(self) -> None:
        self._traced: Any = None  # the last program with a consensus

    def check(self) -> None:
        """Raises ValueError if the program that is traced has called this before."""
        state: Any = get_opaque_trace_state(convention="jdaso")
        # A jit inside another one, or inside a branch of a conditional, belongs to that. What JAX
        # does not promise may be missing in later versions, and the innermost jit then counts.
        trace: Any = getattr(state, "_trace_ref", lambda: None)()
        while _is_jit(trace) and hasattr(trace.parent_trace, "frame"):
            trace = trace.parent_trace
        program = getattr(trace, "_weakref", state)
        if program == self._traced:
            raise ValueError(
                "a program calls consensus or drift twice for one exchange, and the calls have no "
                "order: pass one tree with all arrays, or compile two programs."
            )
        self._traced = program


def _is_jit(trace: Any) -> bool:
    """Whether this is the trace of jit. Each branch of a conditional may have its own consensus."""
    debug_info = getattr(getattr(trace, "frame", None), "debug_info", None)
    return getattr(debug_info, "traced_for", "") == "jit"


def _single_node(topology: Topology, wire: str | None, shardings: Shardings | None) -> Exchange:
    """The exchange of one node, which may consist of several processes."""
    plain = one_node(wire)
    exchange: Exchange = plain
    if shardings is not None:

        def init(params: PyTree, sharded: bool = True) -> PyTree:
            if sharded:
                shardings.register(params)
            return plain.init(params)

        exchange = changed(plain, init=init, may_shard=True)
    _say_alone(len(topology.processes))
    if len(topology.processes) == 1:
        return exchange
    comm = topology.duplicate_comm()
    return changed(
        exchange,
        any_node=lambda flag: any(comm.allgather(flag)),
        _at_close=[comm.Free],
        may_pickle=False,
    )


@functools.cache  # once per process
def _say_alone(processes: int) -> None:
    advice = (
        "For several, start several processes with mpiexec or srun. Check it with: python -m jdaso "
        "doctor"
    )
    if processes > 1:
        advice = (
            f"Its {processes} processes are one JAX program. For several nodes, start processes on "
            "several hosts, or leave out join_processes and jax.distributed.initialize."
        )
    logger.warning("1 node: nothing to exchange with. %s", advice)
