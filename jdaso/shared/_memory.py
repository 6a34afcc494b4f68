"""Shared parameters, as an algorithm sees them, and a simulation of them in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso._base import PyTree
from jdaso._checks import check_whole

# Every array begins at a multiple of a cache line: no two share one, and no number lies across
# two of them, so that a number is read and written as one.
_LINE = 64


class Memory(NamedTuple):
    """Parameters that several processes read and write while they train.

    Attributes:
        process: which of those that update this one is, or whose slave.
        processes: how many update; c in the paper. There are as many locks.
        writes: False for a slave, whose server writes.
        members: how many a server and its slaves are; 1 without slaves.
        params: shapes, dtypes and structure of what is shared.
        read: ``() -> params``, a copy, of NumPy arrays. It takes no lock: it may mix versions,
            but each number is one that has been there.
        add: ``(number, updates, locked) -> None``, adds to the leaves whose positions are the keys,
            number by number, with that lock held or without.
        meet: ``() -> None``, waits until all processes have come here.
        compare: ``(lines) -> None``, raises on all processes where the text is not the same.
    """

    process: int
    processes: int
    writes: bool
    members: int
    params: PyTree
    read: Callable[[], PyTree]
    add: Callable[[int, Mapping[int, Any], bool], None]
    meet: Callable[[], None]
    compare: Callable[[Sequence[str]], None]


def simulated_memory(params: PyTree, processes: int = 1) -> list[Memory]:
    """The memory of several processes that are played by one, in any order.

    With one process it is what :func:`shared_memory` returns where there is only one.

    Args:
        params: arrays; the first values.
        processes: how many are played.

    Returns:
        One :class:`Memory` for each of them, all of the same parameters.

    Raises:
        ValueError: for fewer than one process.

    >>> import numpy as np
    >>> first, second = simulated_memory({"w": np.zeros(2, "f4")}, processes=2)
    >>> first.add(0, {0: np.array([1.0, 2.0])}, True)
    >>> second.read()
    {'w': array([1., 2.], dtype=float32)}
    """
    check_whole("processes", processes, 1)
    arrays = views(np.zeros(size_of(params), np.uint8), params)
    write(arrays, params)
    return [
        Memory(
            process,
            processes,
            writes=True,
            members=1,
            params=shapes(params),
            read=lambda: copied(arrays, params),
            add=lambda number, updates, locked: add_to(arrays, updates),
            meet=lambda: None,
            compare=lambda lines: None,
        )
        for process in range(processes)
    ]


def settled(memory: Memory) -> PyTree:
    """The parameters after all steps that all processes have taken; for evaluation, to be saved.

    All processes must call it. None reads before all have written, and none goes on before all
    have read, so all get the same.

    >>> import numpy as np
    >>> settled(simulated_memory({"w": np.ones(2, "f4")})[0])
    {'w': array([1., 1.], dtype=float32)}
    """
    memory.meet()
    params = memory.read()
    memory.meet()
    return params


def shapes(params: PyTree) -> PyTree:
    """Shapes and dtypes of a tree."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)


def size_of(params: PyTree) -> int:
    """Bytes that hold a tree."""
    return sum(_padded(x.size * x.dtype.itemsize) for x in jax.tree.leaves(shapes(params)))


def views(buffer: np.ndarray, params: PyTree) -> list[np.ndarray]:
    """Leaves of these shapes and dtypes, one after the other, in a buffer of bytes."""
    arrays, offset = [], 0
    for leaf in jax.tree.leaves(shapes(params)):
        size = leaf.size * leaf.dtype.itemsize
        arrays.append(buffer[offset : offset + size].view(leaf.dtype).reshape(leaf.shape))
        offset += _padded(size)
    return arrays


def write(arrays: Sequence[np.ndarray], params: PyTree) -> None:
    """Overwrites the arrays with the leaves of a tree."""
    for array, leaf in zip(arrays, jax.tree.leaves(params), strict=True):
        array[...] = leaf


def copied(arrays: Sequence[np.ndarray], params: PyTree) -> PyTree:
    """A tree like params of copies of the arrays; JAX may take them as they are, without another.

    Of the shared arrays themselves it would do so, too, and compute with what others change.
    """
    return jax.tree.unflatten(jax.tree.structure(params), [array.copy() for array in arrays])


def add_to(arrays: Sequence[np.ndarray], updates: Mapping[int, Any]) -> None:
    """Adds to the arrays at these positions; each number is stored at once."""
    for position, update in updates.items():
        array = arrays[position]
        np.add(array, np.asarray(update, array.dtype), out=array)


def _padded(size: int) -> int:
    return -(-size // _LINE) * _LINE
