"""Messages between two members of a communicator, and the conversion of their contents."""

import numpy as np

from jdaso.core.mpi_types import Comm, MpiRequest
from jdaso.core.wire import BLOCK_DTYPE, pack_sum, sum_divisor, sum_dtype, unpack
from jdaso.exchange.transport.operation import Operation, wait_for


def send(comm: Comm, array: np.ndarray, peer: int, tag: int) -> MpiRequest | None:
    """Starts sending an array; returns None if it is empty."""
    return comm.Isend(array.view(np.uint8), dest=peer, tag=tag) if array.size else None


def receive(comm: Comm, array: np.ndarray, peer: int, tag: int) -> MpiRequest | None:
    """Starts receiving into an array; returns None if it is empty."""
    return comm.Irecv(array.view(np.uint8), source=peer, tag=tag) if array.size else None


def send_receive(
    comm: Comm, outgoing: np.ndarray, dest: int, incoming: np.ndarray, source: int, tag: int
) -> Operation:
    """Sends to one member while receiving from another; returns the bytes sent."""
    arriving = receive(comm, incoming, source, tag)
    leaving = send(comm, outgoing, dest, tag)
    yield from wait_for({source: arriving})
    yield from wait_for({dest: leaving})
    return outgoing.nbytes


def widened(array: np.ndarray) -> np.ndarray:
    """Converts an array from its wire dtype to its accumulation dtype.

    bfloat16 is the upper half of float32. Shifting it is several times faster than a cast, and
    NumPy releases the interpreter lock meanwhile.

    >>> import jax.numpy as jnp, numpy as np
    >>> widened(np.array([1.5, -2.0], jnp.bfloat16)).tolist()
    [1.5, -2.0]
    """
    if array.dtype.name == "bfloat16":
        return np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    if array.dtype == BLOCK_DTYPE:
        return unpack(array)
    return array.astype(sum_dtype(array.dtype), copy=False)


def packed_sum(total: np.ndarray, dtype: np.dtype, terms: int) -> np.ndarray:
    """Converts a sum of ``terms`` arrays to the wire dtype, if that is another one."""
    return total if total.dtype == dtype else pack_sum(total, dtype, terms)


def widened_sum(packed: np.ndarray, terms: int) -> np.ndarray:
    """Converts the result of ``packed_sum`` back to the accumulation dtype."""
    factor = sum_divisor(packed.dtype, terms)
    return widened(packed) if factor == 1 else widened(packed) * factor
