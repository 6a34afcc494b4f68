"""An exchange by blocking mpi4jax collectives, between MPI processes of one device each."""

from __future__ import annotations

import functools
import operator
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdaso.cluster.local_devices import await_programs
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.topology import Topology
from jdaso.core.block_format import FORMATS, format_of
from jdaso.core.exchange import Exchange, changed
from jdaso.core.tree import is_placeholder, outline
from jdaso.core.types import Leaves, PyTree
from jdaso.core.wire import check_wire, pack_sum, sum_dtype, unpack_sum
from jdaso.exchange.axis import StoredExchange, one_node
from jdaso.exchange.transport.collectives import check_alike

# mpi4jax counts elements in 32 bits, without a check.
_MOST_ELEMENTS = 2**31 - 1
_NO_BLOCKS = (
    "mpi4jax_exchange has no wires int8 and float4: use mpi_exchange, or a wire of 16 bits."
)


def mpi4jax_exchange(topology: Topology, wire: str | None = None) -> Exchange:
    """An exchange between MPI processes by mpi4jax collectives, which block.

    It serves blocking phases, baselines and comparisons. It hides no communication, and its sums
    have the same bits as those of :func:`jdaso.mpi_exchange`. mpi4jax requires programs for one
    device. The call is collective over all processes.

    Args:
        topology: The result of :func:`jdaso.discover_topology`, with one device per process.
        wire: Dtype name that overrides the algorithm's choice, or None.

    Returns:
        A :class:`jdaso.Exchange`. Its state holds the sums in flight, one float32 copy of the
        parameters. With one node, the result is that of :func:`jdaso.single_exchange`.

    Raises:
        ValueError: For several devices per process, an unknown wire, int8 or float4. In
            ``update``, if an algorithm chooses int8 or float4.
        JdasoError: In ``init``, if the nodes' parameters differ in structure, shape or dtype.

    >>> import jdaso
    >>> jdaso.exchange.mpi4jax_exchange(jdaso.discover_topology()).num_nodes
    1
    """
    if topology.mesh.size > 1:
        raise ValueError(
            f"mpi4jax_exchange requires one device per JAX program, got {topology.mesh.size}: use "
            "mpi_exchange, or start one process per device, each of them a node."
        )
    if check_wire("wire", wire) in FORMATS:
        raise ValueError(_NO_BLOCKS)
    if topology.num_nodes == 1:
        return one_node(wire)
    mpi4jax, size = _library(), topology.num_nodes
    comm = topology.across_nodes()

    def all_reduce(arrays: Leaves) -> Leaves:
        if any(format_of(x.dtype) for x in arrays):
            raise ValueError(_NO_BLOCKS)
        return _all_reduce(mpi4jax, comm, size, arrays)

    def broadcast(leaves: Leaves, root: int) -> Leaves:
        return [_from_bits(mpi4jax.bcast(_bits(x), root, comm=comm), x.dtype) for x in leaves]

    host_comm = topology.duplicate_comm()

    def compare(params: PyTree) -> None:
        if not is_placeholder(params):
            check_alike(host_comm.allgather(outline(params)), topology.describe)

    complete = functools.partial(await_programs, topology.devices)
    at_close = complete, comm.Free, host_comm.Free, topology.follow()
    exchange = StoredExchange(size, wire, all_reduce, broadcast, compare, at_close)
    return changed(
        exchange,
        any_node=lambda flag: any(host_comm.allgather(flag)),
        may_abandon=False,  # programs of other nodes wait inside MPI for one that has left
        may_pickle=False,
    )


def _library() -> Any:
    """mpi4jax, without its warning about a newer JAX; see docs/guides/installing.md."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\nThe latest supported JAX version")
            import mpi4jax
    except ImportError as error:
        raise ImportError(
            f"mpi4jax cannot be imported ({error}): install it with pip install jdaso[mpi4jax]."
        ) from error
    return mpi4jax


def _all_reduce(mpi4jax: Any, comm: Comm, size: int, arrays: Leaves) -> Leaves:
    """As ``mpi_exchange``: shards of all arrays of a dtype go to their owners, and sums to all."""
    result: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(x.dtype for x in arrays):
        places = [i for i, x in enumerate(arrays) if x.dtype == dtype]
        vector = jnp.concatenate([arrays[i].reshape(-1) for i in places])
        shards = jnp.pad(vector, (0, -vector.size % size)).reshape(size, -1)
        pieces = _from_bits(mpi4jax.alltoall(_bits(shards), comm=comm), dtype)
        # The bits of the result depend on the order of the ranks.
        total = functools.reduce(operator.add, list(pieces.astype(sum_dtype(dtype))))
        back = _bits(pack_sum(total, dtype, size))
        sums = unpack_sum(_from_bits(mpi4jax.allgather(back, comm=comm), dtype), size)
        ends = np.cumsum([arrays[i].size for i in places])
        each = jnp.split(sums.reshape(-1)[: vector.size], ends[:-1])
        for i, part in zip(places, each, strict=True):
            result[i] = part.reshape(arrays[i].shape)
    return result


def _bits(x: jax.Array) -> jax.Array:
    """The bits as unsigned integers, because mpi4jax has neither bfloat16 nor float16."""
    if x.size > _MOST_ELEMENTS:
        raise ValueError(
            f"mpi4jax sends at most {_MOST_ELEMENTS} elements of a dtype, got {x.size}: use "
            "mpi_exchange."
        )
    if x.dtype == np.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x.astype(bool) if dtype == np.bool_ else lax.bitcast_convert_type(x, dtype)
