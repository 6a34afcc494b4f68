"""Exchanges inside one JAX program: along a named axis, and of a single node.

They compute the sum when they are posted, and keep it in their state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdaso.cluster.launchers import detect_launch
from jdaso.core.block_format import format_of
from jdaso.core.exchange import (
    FINITE,
    HEADER_SIZE,
    OWN,
    UNCOUNTED,
    BoundExchange,
    Exchange,
    SentLeaf,
)
from jdaso.core.log import logger
from jdaso.core.tree import all_finite, is_floating, named_floats
from jdaso.core.types import Leaves, PyTree
from jdaso.core.wire import (
    check_wire,
    pack,
    pack_sum,
    shards,
    sum_dtype,
    unpack,
    unpack_sum,
    unpadded,
    wire_dtypes,
)


class StoredState(NamedTuple):
    """The sums in flight, a tree like the parameters, and the summed header."""

    sums: PyTree
    header: jax.Array


class StoredExchange(Exchange):
    """An exchange whose network is a function inside the program. It completes when it is posted.

    Args:
        all_reduce: Sums arrays in their wire dtype over the nodes. Returns the sums in their
            accumulation dtype, rounded to the wire. With the wires int8 and float4, the rows
            that a node would sum over MPI are not rounded.
        broadcast: ``(leaves, root) -> leaves`` of node ``root``.
        compare: Raises if the nodes' parameters differ in structure, shape or dtype.
    """

    keeps_sums = True

    def __init__(
        self,
        num_nodes: int,
        wire: str | None,
        all_reduce: Callable[[Leaves], Leaves],
        broadcast: Callable[[Leaves, int], Leaves],
        compare: Callable[[PyTree], None] = lambda params: None,
        at_close: Sequence[Callable[[], object]] = (),
    ):
        super().__init__(num_nodes, check_wire("wire", wire), at_close=at_close)
        self._all_reduce, self._broadcast, self._compare = all_reduce, broadcast, compare

    def init(self, params: PyTree, sharded: bool = True) -> StoredState:
        self._compare(params)
        sums = jax.tree.map(
            lambda x: (
                jnp.zeros_like(x, sum_dtype(jnp.result_type(x)))  # on the devices of x
                if is_floating(x)
                else optax.MaskedNode()
            ),
            params,
        )
        # A branch of vmap that is not taken must not find sums that are not finite.
        return StoredState(sums, jnp.zeros((HEADER_SIZE,), jnp.float32).at[FINITE].set(1))

    def bind(self, names: Sequence[str], leaves: Leaves) -> BoundExchange:
        return _Stored(self._all_reduce)

    def broadcast(self, names: Sequence[str], leaves: Leaves, root: int) -> Leaves:
        return self._broadcast(leaves, root)

    def sent_leaves(self, state: PyTree) -> list[SentLeaf] | None:
        if not isinstance(state, StoredState):
            return None
        return [SentLeaf(name, x.shape, x.dtype) for name, x in named_floats(state.sums)]


class _Stored(BoundExchange):
    def __init__(self, all_reduce: Callable[[Leaves], Leaves]):
        self._all_reduce = all_reduce

    def post(self, state, number, step, leaves, header, wire, relative=False):
        dtypes = wire_dtypes([x.dtype for x in leaves], wire)
        cast = [
            pack(jnp.where(header[0] > 0, x, jnp.zeros_like(x)), dtype)
            for x, dtype in zip(leaves, dtypes, strict=True)
        ]
        contributes = (header[0] > 0).astype(jnp.float32)
        *sums, header = self._all_reduce([*cast, header.at[0].set(contributes)])
        # Rows of blocks are finite once they are rounded.
        finite = all_finite([s for s, x in zip(sums, cast, strict=True) if not format_of(x.dtype)])
        header = header.at[FINITE].set(finite).at[OWN].set(contributes)
        if relative:
            sums = [s - header[0] * unpack(x) for s, x in zip(sums, cast, strict=True)]
        sums = [
            unpadded(s, x.shape).astype(sum_dtype(x.dtype))
            for s, x in zip(sums, leaves, strict=True)
        ]
        if isinstance(number, int) and number == UNCOUNTED:  # it may have other leaves
            return StoredState(sums, header), number
        treedef = jax.tree.structure(state.sums)
        return StoredState(jax.tree.unflatten(treedef, sums), header), number + 1

    def collect(self, state, number, like, part=None):
        return jax.tree.leaves(state.sums), state.header, state


def axis_exchange(axis_name: str, num_nodes: int, wire: str | None = None) -> Exchange:
    """An exchange along a named axis, whose positions are the nodes.

    Under ``jax.vmap(..., axis_name="node")`` the axis is a virtual cluster on one device. Under
    ``shard_map`` over a mesh with that axis, each node is one device or a group of devices. The
    arithmetic is that of :func:`jdaso.mpi_exchange`, including the rounding on the wire.

    Args:
        axis_name: Name of the axis.
        num_nodes: Size of the axis.
        wire: Dtype name that overrides the algorithm's choice, or None.

    Returns:
        A :class:`jdaso.Exchange`. Its state holds the sums in flight, one float32 copy of the
        parameters.

    Raises:
        ValueError: For fewer than one node or an unknown wire. In ``update``, if the axis has
            another size.

    >>> import jax, jax.numpy as jnp, optax, jdaso
    >>> exchange = jdaso.axis_exchange("node", 4)
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.daso(exchange, period=1, delay=0))
    >>> params = jnp.arange(4.0)
    >>> state = jax.vmap(tx.init)(params)
    >>> step = jax.vmap(lambda p, s: tx.update(jnp.zeros(()), s, p), axis_name="node")
    >>> updates, state = step(params, state)
    >>> (params + updates).tolist()
    [1.5, 1.5, 1.5, 1.5]
    """
    if num_nodes < 1:
        raise ValueError(f"num_nodes must be at least 1, got {num_nodes}.")

    def all_reduce(arrays: Leaves) -> Leaves:
        size = lax.axis_size(axis_name)
        if size != num_nodes:
            raise ValueError(
                f"axis_exchange was given num_nodes={num_nodes}, but axis {axis_name!r} has "
                f"{size} positions: pass the size of the axis."
            )
        sums = lax.psum([unpack(x) for x in arrays], axis_name)
        back = [
            unpack_sum(pack_sum(total, x.dtype, num_nodes), num_nodes)
            for total, x in zip(sums, arrays, strict=True)
        ]
        rows = [i for i, x in enumerate(arrays) if format_of(x.dtype)]
        own = _own_rows([len(arrays[i]) for i in rows], num_nodes, lax.axis_index(axis_name))
        for i, mine in zip(rows, own, strict=True):
            back[i] = jnp.where(mine[:, None], sums[i], back[i])
        return back

    def broadcast(leaves: Leaves, root: int) -> Leaves:
        return [lax.all_gather(x, axis_name)[root] for x in leaves]

    return StoredExchange(num_nodes, wire, all_reduce, broadcast)


def single_exchange(wire: str | None = None) -> Exchange:
    """An exchange of one node without a network, to run a distributed script on one machine.

    Algorithms compute what their equations give for P = 1. A merge with delay 0 rounds to the wire
    dtype and changes nothing else. A merge with a delay mixes in the node's own earlier parameters.

    Args:
        wire: Dtype name that overrides the algorithm's choice, or None.

    >>> import jdaso
    >>> jdaso.single_exchange().num_nodes
    1
    """
    launch = detect_launch(os.environ)
    if launch.processes > 1:
        logger.warning(
            "this job has %d processes, but single_exchange does not connect them, and each trains "
            "alone: use jdaso.mpi_exchange(jdaso.discover_topology()).",
            launch.processes,
        )
    return one_node(wire)


def one_node(wire: str | None) -> StoredExchange:
    """The exchange of one node, which may consist of several processes."""
    return StoredExchange(
        1,
        wire,
        all_reduce=lambda arrays: [unpack(x) for x in arrays],
        broadcast=lambda leaves, root: leaves,
    )


def _own_rows(lengths: Sequence[int], num_nodes: int, node: jax.Array) -> list[jax.Array]:
    """Whether a node sums each row of concatenated arrays in an exchange over MPI.

    >>> [rows.tolist() for rows in _own_rows([2, 3], 2, jnp.int32(1))]
    [[False, False], [True, True, True]]
    """
    owned = shards(sum(lengths), num_nodes)
    first, count = jnp.array(owned.starts)[node], jnp.array(owned.counts)[node]
    starts = accumulate(lengths, initial=0)
    rows = [start + jnp.arange(n) for start, n in zip(starts, lengths, strict=False)]
    return [(first <= r) & (r < first + count) for r in rows]
