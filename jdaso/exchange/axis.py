"""Exchanges along a named axis of one JAX program, and the exchange of a single node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate

import jax
import jax.numpy as jnp
from jax import lax

from jdaso.cluster.launchers import detect_launch
from jdaso.core.block_format import format_of
from jdaso.core.exchange import Exchange
from jdaso.core.log import logger
from jdaso.core.types import Leaves
from jdaso.core.wire import pack_sum, unpack, unpack_sum
from jdaso.exchange.synchronous import stored_exchange
from jdaso.exchange.transport.all_reduce import shards


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
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.daso(exchange, jdaso.constant(period=1)))
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

    return stored_exchange(num_nodes, wire, all_reduce, broadcast)


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


def one_node(wire: str | None) -> Exchange:
    """The exchange of one node, which may consist of several processes."""
    return stored_exchange(
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
