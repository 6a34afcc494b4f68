"""Exchanges that compute the sum when they are posted, and keep it in their state."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso.core.block_format import format_of
from jdaso.core.exchange import FINITE, HEADER_SIZE, OWN, UNCOUNTED, Exchange, SentLeaf
from jdaso.core.tree import is_floating, named_floats
from jdaso.core.types import Leaves, PyTree
from jdaso.core.wire import check_wire, pack, sum_dtype, unpack, unpadded, wire_dtypes


class StoredState(NamedTuple):
    """The sums in flight, a tree like the parameters, and the summed header."""

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
        all_reduce: Sums arrays in their wire dtype over the nodes. Returns the sums in their
            accumulation dtype, rounded to the wire. With the wires int8 and float4, the rows
            that a node would sum over MPI are not rounded.
        broadcast: ``(leaves, root) -> leaves`` of node ``root``.
        compare: Raises if the nodes' parameters differ in structure, shape or dtype.

    Returns:
        A :class:`jdaso.Exchange` that completes when it is posted.
    """

    def init(params: PyTree) -> StoredState:
        compare(params)
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

    def sent_leaves(state: PyTree) -> list[SentLeaf] | None:
        if not isinstance(state, StoredState):
            return None
        return [SentLeaf(name, x.shape, x.dtype) for name, x in named_floats(state.sums)]

    def start(state, number, step, leaves, header, wire, relative=False):
        del step
        dtypes = wire_dtypes([x.dtype for x in leaves], wire)
        cast = [
            pack(jnp.where(header[0] > 0, x, jnp.zeros_like(x)), dtype)
            for x, dtype in zip(leaves, dtypes, strict=True)
        ]
        contributes = (header[0] > 0).astype(jnp.float32)
        *sums, header = all_reduce([*cast, header.at[0].set(contributes)])
        # Rows of blocks are finite once they are rounded.
        finite = [
            jnp.isfinite(s).all() for s, x in zip(sums, cast, strict=True) if not format_of(x.dtype)
        ]
        header = header.at[FINITE].set(jnp.all(jnp.stack([*finite, True]))).at[OWN].set(contributes)
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

    def finish(state, number, like):
        del number, like
        return jax.tree.leaves(state.sums), state.header, state

    return Exchange(
        *(num_nodes, check_wire("wire", wire), init, start, finish, broadcast),
        sent_leaves=sent_leaves,
        keeps_sums=True,
    )
