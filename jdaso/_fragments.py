"""A tree cut into fragments of about equal bytes, which take turns on the network."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import optax

from jdaso._base import PyTree, Remembering
from jdaso._leaves import is_float


def cut(tree: PyTree, count: int) -> list[list[int]]:
    """The positions of the leaves of each fragment; consecutive floating-point leaves.

    Args:
        tree: arrays; leaves of integers and booleans belong to the first fragment, and the
            memory of a parameter to that of the parameter.
        count: number of fragments, each of which gets at least one floating-point leaf.

    Raises:
        ValueError: if there are fewer such leaves than fragments.

    >>> cut([np.ones(6, "f4"), np.ones(2, "f4"), np.ones(3, "f4"), np.ones(1, int)], 2)
    [[0, 3], [1, 2]]
    """
    if isinstance(tree, Remembering):
        return _with_memory(cut(tree.params, count), tree)
    leaves = jax.tree.leaves(tree)
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    rest = [i for i in range(len(leaves)) if i not in set(floats)]
    if len(floats) < count and leaves:
        raise ValueError(
            f"fragments must be at most {len(floats)}, the number of floating-point leaves, got "
            f"{count}."
        )
    sizes = np.array([leaves[i].size * leaves[i].dtype.itemsize for i in floats])
    fragments = [floats[a:b] for a, b in near_equal(sizes, count)]
    return [fragments[0] + rest, *fragments[1:]]


def near_equal(sizes: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Begins and ends of ``count`` runs of consecutive things, of near-equal total sizes.

    No run is empty, so there must be as many things as runs.

    >>> near_equal(np.array([6, 2, 3]), 2)
    [(0, 1), (1, 3)]
    """
    middles = np.cumsum(sizes) - sizes / 2
    ends = [0]
    for k in range(1, count):
        wanted = int(np.searchsorted(middles, sizes.sum() * k / count))
        ends.append(max(ends[-1] + 1, min(wanted, len(sizes) - count + k)))
    ends.append(len(sizes))
    return list(itertools.pairwise(ends))


def _with_memory(fragments: list[list[int]], tree: Remembering) -> list[list[int]]:
    """Adds the positions of the memory, of which each tree is like the parameters."""
    leaves, structure = jax.tree.flatten(tree.params)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    remembered: list[int] = []  # of which parameters, in the order of the memory's leaves
    for moments in tree.memory:
        jax.tree.map(
            lambda m, i: None if isinstance(m, optax.MaskedNode) else remembered.append(i),
            moments,
            numbers,
            is_leaf=lambda node: isinstance(node, optax.MaskedNode),
        )
    return [
        places + [len(leaves) + k for k, i in enumerate(remembered) if i in places]
        for places in fragments
    ]


def part(tree: PyTree, positions: list[int]) -> PyTree:
    """The tree with :class:`optax.MaskedNode` in place of all leaves but those of a fragment."""
    leaves, treedef = jax.tree.flatten(tree)
    keep = set(positions)
    return jax.tree.unflatten(
        treedef, [leaf if i in keep else optax.MaskedNode() for i, leaf in enumerate(leaves)]
    )
