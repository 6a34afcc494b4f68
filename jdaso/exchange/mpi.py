"""The exchange between MPI processes, which runs while training computes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdaso.cluster.topology import Topology
from jdaso.core.exchange import Exchange, HostState, PostedExchange, SentLeaf
from jdaso.core.log import logger
from jdaso.core.tree import is_placeholder, outline
from jdaso.core.types import Leaves, PyTree
from jdaso.core.validation import check_number
from jdaso.core.wire import check_wire
from jdaso.exchange.axis import one_node
from jdaso.exchange.closing import once
from jdaso.exchange.host.compiled import use_native
from jdaso.exchange.host.jit_interface import JitInterface
from jdaso.exchange.host.keys import Keys
from jdaso.exchange.host.shardings import Shardings
from jdaso.exchange.leaf_functions import LeafFunctions, OncePerProgram
from jdaso.exchange.settings import Settings, check_same_settings, check_settings
from jdaso.exchange.transport.host_collectives import HostCollectives
from jdaso.exchange.transport.membership import Membership
from jdaso.exchange.transport.mpi_transport import MpiTransport
from jdaso.exchange.transport.progress import Progress


def mpi_exchange(
    topology: Topology,
    wire: str | None = None,
    chunk_bytes: int = 1 << 22,
    timeout: float = 600.0,
    native: bool | None = None,
    same_bits: bool = True,
    shardings: Any = None,
) -> Exchange:
    """An exchange between MPI processes, advanced by a thread while training computes.

    ``start`` copies the parameters to the host and returns. A progress thread exchanges them in
    chunks and sums them in float32. ``finish`` waits for the sums, if necessary, and returns them.
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
        native: Whether compiled code copies the parameters. None uses it if it was built and the
            devices are CPUs, and warns once otherwise. True also uses it on CUDA devices, where it
            has not been measured. For float64 leaves, host callbacks copy.
        same_bits: Whether it is an error if a centre, an anchor, or the parameters of synchronous
            training differ between nodes in any bit. Pass False if the nodes' hardware rounds
            differently. Schedules and steps are compared in any case. The wires ``int8`` and
            ``float4`` require True: their means are sums of differences and would drift apart.
        shardings: How the parameters are sharded over the node's devices: a tree like the
            parameters with a ``PartitionSpec`` or a ``NamedSharding`` for each, one of these for
            all parameters, or a function of path and leaf that returns one. None if they are
            replicated. A ``PartitionSpec`` refers to ``topology.mesh`` with the axis ``"local"``.
            A ``NamedSharding`` has its own mesh, of all devices of the node and with any axes.

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
        JdasoError: If a process does not call ``mpi_exchange`` within ``timeout``. In ``init``, if
            the nodes' parameters differ in structure, shape, dtype or sharding. In ``update``, if
            nodes are at different steps, if a period, delay, schedule state, centre or anchor
            differs, or if a node is missing at the deadline.

    >>> import jdaso
    >>> exchange = jdaso.mpi_exchange(jdaso.discover_topology())
    >>> exchange.num_nodes
    1
    """
    wire = check_wire("wire", wire)
    settings = Settings(wire, chunk_bytes, same_bits)
    check_number("timeout", timeout, above=True)
    check_settings(settings)
    sharded = Shardings(shardings, topology.mesh)
    # The collectives that follow have no deadline.
    topology.group.barrier("the creation of an exchange", timeout)
    if topology.num_nodes == 1:
        return _single_node(topology, wire, sharded if shardings is not None else None)
    check_same_settings(topology, settings)
    native = use_native(native, topology.devices[0].platform)
    membership = Membership(topology, chunk_bytes)
    progress = Progress(topology, timeout, membership.announce_exit, topology.deaths.abort)
    transport = MpiTransport(membership, progress)
    program = JitInterface(transport, native, sharded)
    collectives = HostCollectives(membership, progress)
    functions = LeafFunctions(
        topology, program, transport, collectives, same_bits, OncePerProgram()
    )
    keys = Keys()

    def compare(tree: PyTree, more: Sequence[str] = ()) -> HostState:
        _wait_until_computed(tree)
        if not is_placeholder(tree):
            collectives.compare([*outline(tree), *more])
        return HostState(jnp.asarray(keys.key(tree), jnp.int32))

    def init(params: PyTree) -> HostState:
        if shardings is not None and program.inside():
            raise ValueError(
                "init inside shard_map gets shards, and shardings are of whole parameters: call "
                "it outside of shard_map."
            )
        return compare(params, sharded.register(params))

    def bind(names: Sequence[str], leaves: Leaves) -> Exchange:
        bound = functions._replace(bound=program.bind(names, leaves))
        return exchange._replace(bind=None, init=compare, **bound.fields())

    def post_again(posted: dict[int, PostedExchange], sent: dict[int, list[SentLeaf]]) -> None:
        layouts = {n: program.posted_layout(sent[n], each) for n, each in posted.items()}
        transport.post_again({n: (layouts[n], each) for n, each in posted.items()})

    exchange = Exchange(
        topology.num_nodes,
        wire,
        init,
        report=transport.statistics.report,
        history=transport.statistics.last,
        posted=transport.posted,
        post_again=post_again,
        restart=functools.partial(_restart, transport, collectives),
        sent_leaves=keys.sent_leaves,
        anyone=collectives.anyone,
        compares=True,
        same_bits=same_bits,
        bind=bind,
        all_devices=program.all_devices,
        close=once(program.close, progress.close, membership.free, transport.forget),
        **functions.fields(),
    )
    return exchange


def _restart(
    transport: MpiTransport,
    collectives: HostCollectives,
    total: int | None,
    params: PyTree,
    gradients: bool,
) -> None:
    transport.restart(total, gradients)
    if params is not None:
        collectives.warn_if_different(params)


def _wait_until_computed(tree: PyTree) -> None:
    """Waits for the arrays of a tree, and thereby until the exchanges before them are posted."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree)):
        jax.block_until_ready(tree)


def _single_node(topology: Topology, wire: str | None, sharded: Shardings | None) -> Exchange:
    """The exchange of one node, which may consist of several processes."""
    exchange = bound = one_node(wire)
    if sharded is not None:

        def init(params: PyTree) -> PyTree:
            sharded.register(params)
            return bound.init(params)

        exchange = bound._replace(init=init, bind=lambda names, leaves: bound)
    if len(topology.processes) == 1:
        _say_alone()
        return exchange
    comm = topology.duplicate_comm()
    return exchange._replace(anyone=lambda flag: any(comm.allgather(flag)), close=once(comm.Free))


@functools.cache  # once per process
def _say_alone() -> None:
    logger.warning(
        "1 node: nothing to exchange with. For several, start several processes with mpiexec or "
        "srun."
    )
