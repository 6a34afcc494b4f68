"""Cuts a tree into fragments, which are exchanged one after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from jdaso.core.tree import is_float, is_masked
from jdaso.core.types import ParamsWithMoments, PyTree

#: The number of fragments of about equal bytes, or ``path of a leaf -> index of its fragment``.
Fragments = int | Callable[[Any], int]


def cut(tree: PyTree, fragments: Fragments) -> list[list[int]]:
    """Assigns the leaves of a tree to fragments.

    With a number of fragments, the floating-point leaves of a fragment are consecutive. Integers
    and booleans belong to the first fragment, and moments to the fragment of their parameter.

    Args:
        tree: arrays, or :class:`jdaso.core.types.ParamsWithMoments`.
        fragments: their number, or a function. Each gets at least one floating-point leaf.

    Returns:
        For each fragment the positions of its leaves in ``jax.tree.leaves(tree)``.

    Raises:
        ValueError: if the tree has fewer floating-point leaves than fragments, or if a function
            leaves out an index.

    >>> cut([np.ones(6, "f4"), np.ones(2, "f4"), np.ones(3, "f4"), np.ones(1, int)], 2)
    [[0, 3], [1, 2]]
    >>> cut([np.ones(6, "f4"), np.ones(2, "f4"), np.ones(3, "f4")], lambda path: path[0].idx % 2)
    [[0, 2], [1]]
    """
    if isinstance(tree, ParamsWithMoments):
        return _with_moments(cut(tree.params, fragments), tree)
    leaves = jax.tree.leaves(tree)
    floats = [i for i, leaf in enumerate(leaves) if is_float(leaf)]
    rest = [i for i in range(len(leaves)) if i not in set(floats)]
    if callable(fragments):
        return _by_path(tree, fragments, floats, rest)
    if len(floats) < fragments and leaves:
        raise ValueError(
            f"fragments must be at most {len(floats)}, the number of floating-point leaves, got "
            f"{fragments}."
        )
    sizes = np.array([leaves[i].size * leaves[i].dtype.itemsize for i in floats])
    parts = [floats[a:b] for a, b in near_equal(sizes, fragments)]
    return [parts[0] + rest, *parts[1:]]


def _by_path(
    tree: PyTree, fragments: Callable[[Any], int], floats: list[int], rest: list[int]
) -> list[list[int]]:
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    index = {i: fragments(paths[i]) for i in floats}
    used = sorted(set(index.values()))
    if used != list(range(len(used))):
        raise ValueError(
            "fragments: the function must return each index from 0 to the number of fragments - 1 "
            f"for at least one floating-point leaf, got the indices {used[:9]}."
        )
    parts = [[i for i in floats if index[i] == k] for k in used] or [[]]
    return [parts[0] + rest, *parts[1:]]


def float_positions(tree: PyTree, fragments: Fragments) -> list[list[int]]:
    """The positions of each fragment's floating-point leaves."""
    leaves = jax.tree.leaves(tree)
    return [[i for i in positions if is_float(leaves[i])] for positions in cut(tree, fragments)]


def num_parameters(tree: PyTree) -> int:
    """How many of a tree's leaves, the first ones, are parameters."""
    return len(jax.tree.leaves(tree.params if isinstance(tree, ParamsWithMoments) else tree))


def near_equal(sizes: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Cuts a sequence of things into ``count`` runs of near-equal total size.

    Returns start and end of each run. No run is empty, so ``sizes`` needs at least ``count``
    elements.

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


def _with_moments(fragments: list[list[int]], tree: ParamsWithMoments) -> list[list[int]]:
    """Adds the positions of the moments. Each tree of moments is like the parameters."""
    leaves, structure = jax.tree.flatten(tree.params)
    numbers = jax.tree.unflatten(structure, range(len(leaves)))
    owners: list[int] = []  # the parameter of each leaf of the moments
    for moments in tree.moments:
        kept = jax.tree.map(
            lambda m, i: () if is_masked(m) else i, moments, numbers, is_leaf=is_masked
        )
        owners += jax.tree.leaves(kept)
    return [
        positions + [len(leaves) + k for k, i in enumerate(owners) if i in positions]
        for positions in fragments
    ]


def part(tree: PyTree, positions: list[int]) -> PyTree:
    """The tree with :class:`optax.MaskedNode` in place of the leaves at other positions."""
    leaves, treedef = jax.tree.flatten(tree)
    keep = set(positions)
    return jax.tree.unflatten(
        treedef, [leaf if i in keep else optax.MaskedNode() for i, leaf in enumerate(leaves)]
    )
