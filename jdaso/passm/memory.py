"""The interface of shared parameters, and a simulation of it in one process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.core.types import PyTree
from jdaso.core.validation import check_whole

# Every array starts at a multiple of a cache line. No number lies across two lines, so the
# processor reads and writes each number in one piece.
_CACHE_LINE_BYTES = 64


class Memory(NamedTuple):
    """Parameters that several processes read and write while they train.

    Attributes:
        process: Index of this process among those that update. For a slave, that of its server.
        processes: Number of processes that update, and number of locks; c in the paper.
        writes: False for a slave, whose server writes.
        members: Number of processes of a server with its slaves. 1 without slaves.
        params: Structure, shapes and dtypes of the parameters.
        read: ``() -> params``, a copy as NumPy arrays. It takes no lock. The copy may mix versions,
            and each number in it was written by one of the processes.
        add: ``(number, updates, locked) -> None`` adds ``updates`` to the leaves whose positions
            are its keys. With ``locked``, it holds the lock of block ``number``.
        barrier: ``() -> None`` waits for all processes.
        compare: ``(lines) -> None`` raises on all processes if the text differs between them.
    """

    process: int
    processes: int
    writes: bool
    members: int
    params: PyTree
    read: Callable[[], PyTree]
    add: Callable[[int, Mapping[int, Any], bool], None]
    barrier: Callable[[], None]
    compare: Callable[[Sequence[str]], None]


def simulated_memory(params: PyTree, processes: int = 1) -> list[Memory]:
    """The memories of several processes that one process simulates, in any order.

    Args:
        params: Arrays, the first values.
        processes: Number of simulated processes.

    Returns:
        One :class:`Memory` for each of them, all of the same parameters.

    Raises:
        ValueError: For fewer than one process.

    >>> import numpy as np
    >>> first, second = simulated_memory({"w": np.zeros(2, "f4")}, processes=2)
    >>> first.add(0, {0: np.array([1.0, 2.0])}, True)
    >>> second.read()
    {'w': array([1., 2.], dtype=float32)}
    """
    check_whole("processes", processes, 1)
    arrays = leaf_views(np.zeros(num_bytes(params), np.uint8), params)
    write_leaves(arrays, params)
    return [
        Memory(
            process,
            processes,
            writes=True,
            members=1,
            params=shapes(params),
            read=lambda: copy_tree(arrays, params),
            add=lambda number, updates, locked: add_updates(arrays, updates),
            barrier=lambda: None,
            compare=lambda lines: None,
        )
        for process in range(processes)
    ]


def settled(memory: Memory) -> PyTree:
    """The parameters after the steps of all processes, for evaluation or to save; collective.

    A barrier before and one after the read ensure that all processes get the same parameters.

    Args:
        memory: From :func:`shared_memory` or :func:`simulated_memory`.

    Returns:
        A copy of the parameters, of NumPy arrays.

    >>> import numpy as np
    >>> settled(simulated_memory({"w": np.ones(2, "f4")})[0])
    {'w': array([1., 1.], dtype=float32)}
    """
    memory.barrier()
    params = memory.read()
    memory.barrier()
    return params


def shapes(params: PyTree) -> PyTree:
    """The parameters with a ``jax.ShapeDtypeStruct`` in place of each array."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


def num_bytes(params: PyTree) -> int:
    """Size of the buffer for :func:`leaf_views`."""
    return sum(_padded_size(x.size * x.dtype.itemsize) for x in jax.tree.leaves(shapes(params)))


def leaf_views(buffer: np.ndarray, params: PyTree) -> list[np.ndarray]:
    """Views of a uint8 buffer with the shapes and dtypes of the leaves of a tree."""
    arrays, offset = [], 0
    for leaf in jax.tree.leaves(shapes(params)):
        size = leaf.size * leaf.dtype.itemsize
        arrays.append(buffer[offset : offset + size].view(leaf.dtype).reshape(leaf.shape))
        offset += _padded_size(size)
    return arrays


def write_leaves(arrays: Sequence[np.ndarray], params: PyTree) -> None:
    """Copies the leaves of a tree to arrays of the same shapes."""
    for array, leaf in zip(arrays, jax.tree.leaves(params), strict=True):
        array[...] = leaf


def copy_tree(arrays: Sequence[np.ndarray], params: PyTree) -> PyTree:
    """A tree like params of copies of the arrays.

    JAX may use NumPy memory without copying it. It must not use memory that others change.
    """
    return jax.tree.unflatten(jax.tree.structure(params), [array.copy() for array in arrays])


def add_updates(arrays: Sequence[np.ndarray], updates: Mapping[int, Any]) -> None:
    """Adds to the arrays at these positions. Each number is stored in one piece."""
    for position, update in updates.items():
        array = arrays[position]
        np.add(array, np.asarray(update, array.dtype), out=array)


def _padded_size(size: int) -> int:
    return -(-size // _CACHE_LINE_BYTES) * _CACHE_LINE_BYTES
