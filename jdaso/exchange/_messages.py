"""Messages between members of a communicator, and the numbers in them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np

from jdaso._wire import BLOCKS, back_factor, pack_sum, sum_dtype, unpack


class Waiting(NamedTuple):
    """For whom and for what an operation waits.

    Attributes:
        ranks: of a communicator.
        moved: whether it has come further since it said so the last time.
        requests: MPI's. Where there are any, it can only go on when one of them is complete.
        lost: whether it cannot go on before those that have died are left out.
    """

    ranks: frozenset[int]
    moved: bool = False
    requests: tuple[Any, ...] = ()
    lost: bool = False


class Regrouped(Exception):
    """Raised in operations under way once those that are left have come together."""


# An operation says for whom it waits whenever it cannot go on, and returns its result.
Waits = Generator[Waiting, None, Any]


def send(comm: Any, array: np.ndarray, peer: int, tag: int) -> Any:
    """A request; None for nothing."""
    return comm.Isend(array.view(np.uint8), dest=peer, tag=tag) if array.size else None


def receive(comm: Any, array: np.ndarray, peer: int, tag: int) -> Any:
    """A request; None for nothing."""
    return comm.Irecv(array.view(np.uint8), source=peer, tag=tag) if array.size else None


def wait_for(requests: dict[int, Any]) -> Waits:
    """Waits for the ranks of the communicator whose requests are not complete, until all are."""
    pending = {peer: request for peer, request in requests.items() if request is not None}
    before = None
    while pending := {peer: request for peer, request in pending.items() if not request.Test()}:
        yield Waiting(frozenset(pending), len(pending) != before, tuple(pending.values()))
        before = len(pending)


def trade(
    comm: Any, outgoing: np.ndarray, to: int, incoming: np.ndarray, source: int, tag: int
) -> Waits:
    """Sends to one member and receives from one, at the same time."""
    arriving = receive(comm, incoming, source, tag)
    leaving = send(comm, outgoing, to, tag)
    yield from wait_for({source: arriving})
    yield from wait_for({to: leaving})
    return outgoing.nbytes


def widened(array: np.ndarray) -> np.ndarray:
    """An array in the dtype in which it is added up.

    bfloat16 is the upper half of float32: shifting it is several times faster than a cast, and
    numpy does it without holding the interpreter.

    >>> import jax.numpy as jnp, numpy as np
    >>> widened(np.array([1.5, -2.0], jnp.bfloat16)).tolist()
    [1.5, -2.0]
    """
    if array.dtype.name == "bfloat16":
        return np.left_shift(array.view(np.uint16), 16, dtype=np.uint32).view(np.float32)
    if array.dtype == BLOCKS:
        return unpack(array)
    return array.astype(sum_dtype(array.dtype), copy=False)


def packed_sum(total: np.ndarray, dtype: np.dtype, terms: int) -> np.ndarray:
    """A sum of so many as it travels; itself, where that is the dtype in which it was added."""
    return total if total.dtype == dtype else pack_sum(total, dtype, terms)


def widened_sum(packed: np.ndarray, terms: int) -> np.ndarray:
    """What ``packed_sum`` has packed, in the dtype in which it is added up."""
    factor = back_factor(packed.dtype, terms)
    return widened(packed) if factor == 1 else widened(packed) * factor
