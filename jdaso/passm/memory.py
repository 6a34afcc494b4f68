"""The interface of shared parameters, and a simulation of it in one process."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdaso.core.types import PyTree
from jdaso.core.validation import check_whole

Updates = Mapping[int, Mapping[int, Any]]


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
        add: ``(updates, locked) -> None``, one write. ``updates`` maps the index of a process to
            what is added to the leaves that it is responsible for, a mapping from the positions
            of leaves. With ``locked``, the lock of each process's leaves is held while they
            change, one lock at a time.
        barrier: ``() -> None`` waits for all processes. What they read afterwards contains
            everything that was written before.
        compare: ``(lines) -> None`` raises on all processes if the text differs between them.
    """

    process: int
    processes: int
    writes: bool
    members: int
    params: PyTree
    read: Callable[[], PyTree]
    add: Callable[[Updates, bool], None]
    barrier: Callable[[], None]
    compare: Callable[[Sequence[str]], None]


def simulated_memory(
    params: PyTree, processes: int = 1, max_delay: int = 0, seed: int = 0
) -> list[Memory]:
    """The memories of several processes that one process simulates, in any order.

    A simulated step reads, computes and writes before the next one begins. Without delays it
    therefore reads what the previous step has written, and the training is sequential. With
    ``max_delay``, each number of a read has a delay of its own and comes from the version that the
    memory held that many writes ago:

        (x_1^{k - d_1}, ..., x_n^{k - d_n}),   0 <= d_j <= delta   (passm Assumption 2.1)

    The paper bounds the delays and leaves their distribution open. Here they are independent and
    uniform, and nothing is older than the first values or the last barrier. A step's write is
    added to the newest version at once, and it counts as one version even if it changes all
    leaves.

    Args:
        params: Arrays, the first values.
        processes: Number of simulated processes.
        max_delay: The largest delay in writes of all processes; delta in the paper. The simulation
            keeps as many older versions of what was written.
        seed: Seed of the delays. The same steps in the same order read the same numbers again.

    Returns:
        One :class:`Memory` for each of them, all of the same parameters.

    Raises:
        ValueError: For fewer than one process, or a delay or seed below 0.

    >>> import numpy as np
    >>> first, second = simulated_memory({"w": np.zeros(2, "f4")}, processes=2)
    >>> first.add({0: {0: np.array([1.0, 2.0])}}, True)
    >>> second.read()
    {'w': array([1., 2.], dtype=float32)}
    """
    check_whole("processes", processes, 1)
    check_whole("max_delay", max_delay, 0)
    check_whole("seed", seed, 0)
    structure, rng = jax.tree.structure(params), np.random.default_rng(seed)
    first = [np.array(leaf, jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)]
    versions = collections.deque([first], max_delay + 1)  # the newest first; arrays never change

    def read() -> PyTree:
        return jax.tree.unflatten(
            structure, [_mixed(leaves, max_delay, rng) for leaves in zip(*versions, strict=True)]
        )

    def add(updates: Updates, locked: bool) -> None:
        given = {i: update for of_process in updates.values() for i, update in of_process.items()}
        newest = [np.array(x) if i in given else x for i, x in enumerate(versions[0])]
        add_updates(newest, given)
        versions.appendleft(newest)

    def barrier() -> None:
        while len(versions) > 1:
            versions.pop()

    return [
        Memory(
            process,
            processes,
            writes=True,
            members=1,
            params=shapes(params),
            read=read,
            add=add,
            barrier=barrier,
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


def add_updates(arrays: Sequence[np.ndarray], updates: Mapping[int, Any]) -> None:
    """Adds to the arrays at these positions. Each number is stored in one piece."""
    for position, update in updates.items():
        array = arrays[position]
        np.add(array, np.asarray(update, array.dtype), out=array)


def _mixed(versions: Sequence[np.ndarray], max_delay: int, rng: np.random.Generator) -> np.ndarray:
    """A copy of an array whose numbers come from its versions, of which the newest is first."""
    mixed = versions[0].copy()
    if len(versions) > 1:
        drawn = rng.integers(max_delay, size=mixed.shape, endpoint=True)
        delays = np.minimum(drawn, len(versions) - 1)
        for delay, version in enumerate(versions):
            np.copyto(mixed, version, where=delays == delay)
    return mixed
