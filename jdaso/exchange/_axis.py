"""Nodes as a named axis of one JAX program: a virtual cluster, or a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso._base import Exchange, Leaves
from jdaso._wire import BLOCKS, pack_sum, unpack, unpack_sum
from jdaso.exchange._all_reduce import shards
from jdaso.exchange._stored import stored_exchange


def axis_exchange(axis_name: str, num_nodes: int, wire: str | None = None) -> Exchange:
    """Nodes are the positions of a named axis.

    Under ``jax.vmap(..., axis_name="node")`` that is a virtual cluster on one device; under
    ``shard_map`` over a mesh with that axis, one device (or group of devices) per node. The
    arithmetic is that of :func:`jdaso.mpi_exchange`, rounding on the wire included.

    Args:
        axis_name: name of the axis whose positions are the nodes.
        num_nodes: its size.
        wire: dtype name forced on everything that crosses; None leaves it to the algorithm.

    Returns:
        A :class:`jdaso.Exchange`; its state holds the sums in flight, one float32 copy of the
        parameters.

    Raises:
        ValueError: for fewer than one node or an unknown wire, and in ``update`` if the axis
            turns out to have another size.

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
                f"axis_exchange was made for num_nodes={num_nodes}, but axis {axis_name!r} has "
                f"{size} positions."
            )
        sums = lax.psum([unpack(x) for x in arrays], axis_name)
        back = [
            unpack_sum(pack_sum(total, x.dtype, num_nodes), num_nodes)
            for total, x in zip(sums, arrays, strict=True)
        ]
        blocks = [i for i, x in enumerate(arrays) if x.dtype == BLOCKS]
        owners = _owners([len(arrays[i]) for i in blocks], num_nodes)
        node = lax.axis_index(axis_name)
        for i, owner in zip(blocks, owners, strict=True):
            back[i] = jnp.where(owner[:, None] == node, sums[i], back[i])
        return back

    def broadcast(leaves: Leaves, root: int) -> Leaves:
        return [lax.all_gather(x, axis_name)[root] for x in leaves]

    return stored_exchange(num_nodes, wire, all_reduce, broadcast)


def single_exchange(wire: str | None = None) -> Exchange:
    """An exchange with nobody: one node, no network.

    For running a distributed script on one machine. Algorithms do with it what their formulas
    say for P = 1: a merge with delay 0 rounds to the wire and changes nothing else, one with a
    delay mixes in the node's own earlier parameters.

    Args:
        wire: dtype name forced on what would cross; None leaves it to the algorithm.

    >>> import jdaso
    >>> jdaso.single_exchange().num_nodes
    1
    """
    return stored_exchange(
        1,
        wire,
        all_reduce=lambda arrays: [unpack(x) for x in arrays],
        broadcast=lambda leaves, root: leaves,
    )


def _owners(lengths: Sequence[int], num_nodes: int) -> list[np.ndarray]:
    """Which node would add up each row of arrays that are laid end to end, over MPI.

    >>> _owners([2, 3], 2)
    [array([0, 0]), array([1, 1, 1])]
    """
    owned = [shard.stop - shard.start for shard in shards(sum(lengths), num_nodes)]
    owner, ends = np.repeat(np.arange(num_nodes), owned), accumulate(lengths)
    return [owner[end - length : end] for length, end in zip(lengths, ends, strict=True)]
