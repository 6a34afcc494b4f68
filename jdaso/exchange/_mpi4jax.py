"""Nodes as MPI processes of one device each; blocking collectives inside the program."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso._base import Exchange, Leaves, PyTree
from jdaso._leaves import outline
from jdaso._wire import BLOCKS, check_wire, pack_sum, sum_dtype, unpack_sum
from jdaso.exchange._axis import single_exchange
from jdaso.exchange._operations import check_alike
from jdaso.exchange._stored import stored_exchange
from jdaso.topology import Topology

_NO_INT8 = "mpi4jax_exchange has no wire 'int8'; use mpi_exchange, or a wire of 16 bits."


def mpi4jax_exchange(topology: Topology, wire: str | None = None) -> Exchange:
    """Nodes are MPI processes; exchanges are mpi4jax collectives and block.

    For blocking phases, baselines, and comparison: it hides nothing, but the sums are those of
    :func:`jdaso.mpi_exchange`, bit for bit. mpi4jax works in programs for one device only.
    Collective over all processes.

    Args:
        topology: from :func:`jdaso.discover_topology`, with one device per process.
        wire: dtype name forced on all exchanges of algorithms; None leaves it to the algorithm.

    Returns:
        A :class:`jdaso.Exchange`; its state holds the sums in flight, one float32 copy of the
        parameters. With one node, :func:`jdaso.single_exchange`.

    Raises:
        ValueError: for several devices per process, an unknown wire, or int8, which only the
            other exchanges have; in ``update``, if an algorithm asks for it.
        JdasoError: in ``init``, if the nodes' parameters differ in structure, shape or dtype.

    >>> import jdaso
    >>> jdaso.mpi4jax_exchange(jdaso.discover_topology()).num_nodes
    1
    """
    _check_one_device("mpi4jax_exchange", topology)
    if check_wire("wire", wire) == "int8":
        raise ValueError(_NO_INT8)
    if topology.num_nodes == 1:
        return single_exchange(wire)
    mpi4jax = _library()
    comm = topology.group_communicators()[topology.local_rank]
    size = topology.num_nodes

    def all_reduce(arrays: Leaves) -> Leaves:
        if any(x.dtype == BLOCKS for x in arrays):
            raise ValueError(_NO_INT8)
        return _fused(functools.partial(_all_reduce, mpi4jax, comm, size), arrays)

    def broadcast(leaves: Leaves, root: int) -> Leaves:
        return [_from_bits(mpi4jax.bcast(_bits(x), root, comm=comm), x.dtype) for x in leaves]

    aside = topology.comm.Dup()

    def compare(params: PyTree) -> None:
        if jax.tree.leaves(params):  # optax.tree_map_params calls init on a tree without leaves
            check_alike(aside.allgather(outline(params)), topology.describe)

    def anyone(flag: bool) -> bool:
        return any(aside.allgather(flag))

    exchange = stored_exchange(size, wire, all_reduce, broadcast, compare)
    return exchange._replace(anyone=anyone)


def process_mean(topology: Topology) -> Callable[[PyTree], PyTree] | None:
    """The mean over the processes of a node, for nodes that are one process per device.

    Args:
        topology: from :func:`jdaso.discover_topology`.

    Returns:
        A function of a list of floating-point arrays, for the ``across`` argument of
        :func:`jdaso.local_value_and_grad`; blocking, one collective for each dtype. None where
        a node is one process, which has nobody to average with. Collective over all processes.

    >>> import jdaso
    >>> jdaso.process_mean(jdaso.discover_topology()) is None
    True
    """
    if topology.processes_per_node == 1:
        return None
    mpi4jax = _library()
    comm = topology.node_communicator()
    size = topology.processes_per_node

    def mean(arrays: Leaves) -> Leaves:
        sums = _fused(functools.partial(_all_reduce, mpi4jax, comm, size), arrays)
        return [(s / size).astype(x.dtype) for s, x in zip(sums, arrays, strict=True)]

    return mean


def _library() -> Any:
    try:
        import mpi4jax
    except ImportError as error:
        raise ImportError(
            f"mpi4jax cannot be imported ({error}); it is an extra of jdaso, jdaso[mpi4jax]."
        ) from error
    return mpi4jax


def _check_one_device(name: str, topology: Topology) -> None:
    if len(topology.devices) > 1:
        raise ValueError(
            f"{name} needs one device per process, got {len(topology.devices)}: mpi4jax cannot "
            "be used in programs for several devices. Use mpi_exchange, or start one process per "
            "device."
        )


def _fused(all_reduce: Callable[[jax.Array], jax.Array], arrays: Leaves) -> Leaves:
    """Applies an all-reduce of vectors to arrays, laid end to end for each dtype."""
    result: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        places = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        vector = jnp.concatenate([arrays[i].reshape(-1) for i in places])
        ends = np.cumsum([arrays[i].size for i in places])
        for i, part in zip(places, jnp.split(all_reduce(vector), ends[:-1]), strict=True):
            result[i] = part.reshape(arrays[i].shape)
    return result


def _all_reduce(mpi4jax: Any, comm: Any, size: int, vector: jax.Array) -> jax.Array:
    """The two passes of ``_all_reduce.py`` as collectives: shards to their owners, sums back."""
    dtype, length = vector.dtype, vector.size
    shards = jnp.pad(vector, (0, -length % size)).reshape(size, -1)
    pieces = _from_bits(mpi4jax.alltoall(_bits(shards), comm=comm), dtype)
    # One after the other: the order of ranks is part of the result.
    total = functools.reduce(operator.add, list(pieces.astype(sum_dtype(dtype))))
    back = _bits(pack_sum(total, dtype, size))
    sums = unpack_sum(_from_bits(mpi4jax.allgather(back, comm=comm), dtype), size)
    return sums.reshape(-1)[:length]


def _bits(x: jax.Array) -> jax.Array:
    """The same bits as unsigned integers, since mpi4jax knows neither bfloat16 nor float16."""
    if x.dtype == np.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.astype(bool) if dtype == np.bool_ else lax.bitcast_convert_type(x, dtype)
