"""Exchanges whose sum is computed when it is posted and waits in the state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso._base import HEADER_SIZE, Exchange, Leaves, PyTree
from jdaso._leaves import is_float
from jdaso._wire import check_wire, pack, sum_dtype, unpadded, wire_dtype


class StoredState(NamedTuple):
    """The sums in flight, a tree like the parameters, and their header."""

    sums: PyTree
    header: jax.Array


def stored_exchange(
    num_nodes: int,
    wire: str | None,
    all_reduce: Callable[[Leaves], Leaves],
    broadcast: Callable[[Leaves, int], Leaves],
    compare: Callable[[PyTree], None] = lambda params: None,
) -> Exchange:
    """An exchange whose network is a function inside the program.

    Args:
        num_nodes: members of the exchange.
        wire: dtype name forced on what crosses, or None.
        all_reduce: adds up arrays, given as they cross, over the nodes; returns the sums
            rounded to the wire, in the dtype in which they were accumulated. Of those of blocks
            (the wire int8) the rows that a node adds up over MPI are not rounded.
        broadcast: the leaves of one node.
        compare: raises if the nodes' parameters are not alike.

    Returns:
        An :class:`jdaso.Exchange` that is finished as soon as it has started.
    """

    def init(params: PyTree) -> StoredState:
        compare(params)
        sums = jax.tree.map(
            lambda x: (
                jnp.zeros(jnp.shape(x), sum_dtype(jnp.result_type(x)))
                if is_float(x)
                else optax.MaskedNode()
            ),
            params,
        )
        return StoredState(sums, jnp.zeros((HEADER_SIZE,), jnp.float32))

    def start(state, number, step, leaves, header, wire):
        del step
        cast = [
            pack(jnp.where(header[0] > 0, x, jnp.zeros_like(x)), wire_dtype(x.dtype, wire))
            for x in leaves
        ]
        *sums, header = all_reduce([*cast, header])
        sums = [
            unpadded(s, x.shape).astype(sum_dtype(x.dtype))
            for s, x in zip(sums, leaves, strict=True)
        ]
        treedef = jax.tree.structure(state.sums)
        return StoredState(jax.tree.unflatten(treedef, sums), header), number + 1

    def finish(state, number, like):
        del number, like
        return jax.tree.leaves(state.sums), state.header, state

    return Exchange(num_nodes, check_wire("wire", wire), init, start, finish, broadcast)
