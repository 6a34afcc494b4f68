"""Nodes as MPI processes; exchanges fly while training goes on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jdaso._base import Exchange, Leaves, PyTree
from jdaso._checks import check_choice, check_number, check_whole
from jdaso._leaves import outline
from jdaso._wire import check_wire
from jdaso.exchange._all_reduce import PATTERNS
from jdaso.exchange._axis import single_exchange
from jdaso.exchange._channels import Strategy
from jdaso.exchange._courier import Courier
from jdaso.exchange._fault_tolerance import ON_FAILURE, check_can_shrink, leave_in_time
from jdaso.exchange._native import chosen
from jdaso.exchange._program import Program
from jdaso.topology import Topology

SENDERS = ("one", "all")


def mpi_exchange(
    topology: Topology,
    wire: str | None = None,
    chunk_bytes: int = 1 << 20,
    timeout: float = 600.0,
    native: bool | None = None,
    pattern: str = "direct",
    senders: str = "one",
    on_failure: str = "stop",
    same_bits: bool = True,
) -> Exchange:
    """Nodes are MPI processes; what is posted is carried by a thread of its own.

    ``start`` copies the parameters to the host and returns; a thread exchanges them in chunks,
    adding up in float32; ``finish`` returns the sums, waiting if it must. Of n bytes on the wire,
    a node sends ``2 (P-1)/P n``, the least that an all-reduce can. Collective over all processes.

    How the bytes cross, with latency a and the members P of a communicator:

    Before, all processes tell each other in a few bytes which exchange it is (one latency more, not
    in ``bytes_sent``); with leaves of several dtypes on the wire the following is done for each.

    - ``pattern="direct"``: two messages after one another, ``2 a``, P-1 of them side by side;
      added up in the order of nodes, rounded twice, and so bit for bit what the other exchanges
      compute. ``"ring"``: ``2 (P-1) a``, no node is written to by two at once. ``"halving"``:
      ``2 log2(P) a``, for P a power of two. The last two add up in another order, and a wire
      narrower than float32 rounds at every hop.
    - ``senders="one"``: the k-th exchange is carried by local index ``k mod L`` of each node.
      ``"all"``: each local index carries 1/L of every exchange on its own communicator, eight of
      them at once; with several processes per node, each of them sends. The same bits.

    From jit on replicated values the program calls the host once per node; from inside
    ``shard_map`` over the axis ``"local"`` one device posts, and each collects a copy. One
    exchange serves one optimizer state: make another for another. A state is stepped once:
    ``optax.MultiSteps``, which steps it at every micro-batch and drops what it does not need,
    ends with an error; accumulate gradients in the training step instead.

    Args:
        topology: from :func:`jdaso.discover_topology`.
        wire: dtype name forced on all exchanges of algorithms, ``float32``, ``bfloat16``,
            ``float16`` or ``int8``; None leaves it to the algorithm.
        chunk_bytes: size of one message at most.
        timeout: seconds after which an exchange that has not ended is an error; where the last
            hundred took long, median + 200 median deviations of them, if that is more. It must
            cover everything that one node does alone, such as an evaluation or a checkpoint.
            Before that, after 30 seconds or median + 20 deviations, it is a warning.
        native: whether parameters are copied by compiled code; None: where it was built and the
            devices are CPUs, with a warning, once, where they are not. True asks for it on CUDA
            devices, too, where it has not been measured. With several devices
            per process it serves inside ``shard_map`` over ``"local"``; outside, and for float64
            leaves, host callbacks copy all the same.
        pattern: ``direct``, ``ring`` or ``halving``, as above.
        senders: ``one`` or ``all``, as above.
        on_failure: what to do when a process has died: ``stop`` ends all; with ``shrink`` those
            that are left go on, where the MPI library can (Open MPI 5, ``mpirun --with-ft ulfm``),
            with one process per node. What was in flight is summed again among them, sums and
            their weights are those of who is left, and ``topology()`` of the exchange says who
            that is. An exception, a disagreement, or one that is silent ends all the same. Not
            with ``halving``.
        same_bits: whether a centre, an anchor, or parameters of synchronous training that are not
            the same on all nodes, bit for bit, are an error. False for nodes whose hardware
            rounds differently; then their schedules and steps are compared, but not these. Not
            with int8, whose means are sums of differences and would drift apart.

    Returns:
        A :class:`jdaso.Exchange`. Its state is one int32; what is in flight is with the host,
        two copies of the parameters and some messages, and ``posted()`` hands it out. ``init``
        compares the nodes' parameters, so all must call it. With one node,
        :func:`jdaso.single_exchange`.

    Raises:
        ValueError: for an unknown wire, pattern or sender, numbers that are not positive,
            ``native=True`` where compiled copies cannot be used, ``halving`` on a number of nodes
            that is no power of two, or may become one that is not, ``shrink`` where MPI cannot,
            int8, also of an algorithm, with a pattern that is not ``direct``, as error feedback
            needs to know all that is rounded, or with ``same_bits=False``; or if processes were
            not given the same (but for ``timeout`` and ``native``).
        JdasoError: in ``init``, if the nodes' parameters differ in structure, shape or dtype;
            in ``update``, if nodes are at different steps, if what must be equal is not (period
            and delay, the schedule's state, centre or anchor), or one is missing at the deadline.

    >>> import jdaso
    >>> exchange = jdaso.mpi_exchange(jdaso.discover_topology())
    >>> exchange.num_nodes
    1
    """
    wire = check_wire("wire", wire)
    check_whole("chunk_bytes", chunk_bytes, 16)
    if chunk_bytes >= 2**31:
        raise ValueError(f"chunk_bytes must be below 2**31, got {chunk_bytes}.")
    check_number("timeout", timeout, above=True)
    check_choice("pattern", pattern, PATTERNS)
    check_choice("senders", senders, SENDERS)
    check_choice("on_failure", on_failure, ON_FAILURE)
    nodes = topology.num_nodes
    shrinks = on_failure == "shrink"
    if pattern == "halving" and shrinks:
        raise ValueError(
            "pattern='halving' needs 2, 4, 8, ... nodes, and on_failure='shrink' makes them fewer; "
            "use 'direct' or 'ring'."
        )
    if pattern == "halving" and nodes & (nodes - 1):
        raise ValueError(
            f"pattern='halving' needs 2, 4, 8, ... nodes, and there are {nodes}; use 'ring', which "
            "sends as many bytes, or 'direct'."
        )
    if wire == "int8":
        _check_int8(pattern, same_bits)
    if nodes == 1:
        alone = single_exchange(wire)
        if len(topology.processes) == 1:
            return alone
        node = topology.comm.Dup()
        return alone._replace(anyone=lambda flag: any(node.allgather(flag)))
    _check_alike(
        topology,
        {
            "wire": wire,
            "chunk_bytes": chunk_bytes,
            "pattern": pattern,
            "senders": senders,
            "on_failure": on_failure,
            "same_bits": same_bits,
        },
    )
    native = chosen(native, topology.devices[0].platform)
    if shrinks:
        check_can_shrink(topology)
        # Each exchange finds out by itself who is left.
        topology = dataclasses.replace(topology, comm=topology.comm.Dup())
        leave_in_time()
        if topology.heartbeat is not None:
            topology.heartbeat.outlive(lambda rank: None, silence=False)  # MPI tells deaths, too
    courier = Courier(topology, Strategy(pattern, senders, chunk_bytes), timeout, shrinks)
    program = Program(courier, native, topology.devices)

    def init(params: PyTree) -> jax.Array:
        if jax.tree.leaves(params):  # optax.tree_map_params calls init on a tree without leaves
            courier.compare(outline(params))
        return jnp.zeros((), jnp.int32)

    def start(ticket, number, step, leaves: Leaves, header, wire):
        if wire == "int8":
            _check_int8(pattern, same_bits)
        return program.start(ticket, number, step, leaves, header, wire)

    def broadcast(leaves: Leaves, root: int) -> Leaves:
        def call(*leaves):
            with courier.ending_all_devices():
                return np.bool_(True), courier.broadcast(leaves, root)

        shape = jax.ShapeDtypeStruct((), bool)
        arrived, sent = io_callback(call, (shape, leaves), *leaves)
        # Always so; but in a program for several devices what the host returned lies on one of
        # them, until it meets something that lies on all.
        return [jnp.where(arrived, y, x) for y, x in zip(sent, leaves, strict=True)]

    return Exchange(
        nodes,
        wire,
        init,
        start,
        program.finish,
        broadcast,
        report=courier.history.report,
        history=courier.history.last,
        posted=courier.posted,
        post_again=courier.post_again,
        anyone=courier.anyone,
        compares=True,
        same_bits=same_bits,
        topology=courier.topology,
    )


def _check_alike(topology: Topology, settings: dict[str, object]) -> None:
    """Raises on all processes, or nodes would wait for messages that the others do not send."""
    given = topology.comm.allgather(settings)
    for rank, other in enumerate(given):
        for name, value in given[0].items():
            if other[name] != value:
                raise ValueError(
                    f"{name} must be the same on all processes, but mpi_exchange was given "
                    f"{value!r} in {topology.describe(0)} and {other[name]!r} in "
                    f"{topology.describe(rank)}."
                )


def _check_int8(pattern: str, same_bits: bool) -> None:
    if not same_bits:
        raise ValueError(
            "same_bits=False is for nodes whose last bits differ, and the wire int8 sends "
            "differences to a mean that must be the same on all: choose the wire bfloat16."
        )
    if pattern != "direct":
        raise ValueError(
            f"pattern={pattern!r} rounds sums on their way, of which error feedback knows nothing: "
            "the wire int8 needs pattern='direct'. With this pattern choose the wire bfloat16."
        )
