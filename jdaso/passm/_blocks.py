"""The parameters cut into blocks of consecutive layers, one for each process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdaso._base import PyTree
from jdaso._checks import check_whole
from jdaso._fragments import near_equal
from jdaso._leaves import is_float

Block = tuple[int, ...]


def partition(params: PyTree, num_blocks: int, order: Sequence[int] | None = None) -> list[Block]:
    """Blocks of consecutive layers, of near-equal numbers of weights (passm Sec. 4).

    A layer is what one innermost container holds under names, such as a kernel and its bias; each
    array of a list, or of the tree itself, is a layer of its own. No layer is cut, so a block
    differs from its share of the weights by the largest layer at most.

    Args:
        params: arrays; those of integers and booleans belong to no block.
        num_blocks: how many, one for each process; c in the paper.
        order: positions of the leaves from input to output, as :func:`order_of_use` finds them.
            None: the order of the tree.

    Returns:
        For each block the positions of its arrays in ``jax.tree.leaves(params)``, ascending; the
        first block is the one next to the input.

    Raises:
        ValueError: for fewer than one block, more blocks than layers, or an order that does not
            name every position once.

    >>> import numpy as np
    >>> params = {"conv": {"bias": np.ones(2), "kernel": np.ones(4)}, "head": np.ones(6)}
    >>> partition(params, 2)
    [(0, 1), (2,)]
    """
    check_whole("num_blocks", num_blocks, 1)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    order = range(len(leaves)) if order is None else order
    if sorted(order) != list(range(len(leaves))):
        raise ValueError(
            f"order must name each of the {len(leaves)} positions in jax.tree.leaves(params) "
            f"once, got {list(order)}."
        )
    layers: dict[Any, list[int]] = {}
    for position in order:
        path, leaf = leaves[position]
        if is_float(leaf):
            layers.setdefault(_layer(path, position), []).append(position)
    if num_blocks > len(layers):
        raise ValueError(
            f"num_blocks must be at most {len(layers)}, the number of layers, got {num_blocks}; "
            "start fewer processes."
        )
    members = list(layers.values())
    weights = np.array([sum(np.size(leaves[i][1]) for i in layer) for layer in members])
    return [
        tuple(sorted(position for layer in members[first:end] for position in layer))
        for first, end in near_equal(weights, num_blocks)
    ]


def check_blocks(blocks: Sequence[Block], params: PyTree, processes: int) -> None:
    """Raises ValueError unless there is a block for each process, and all share out params."""
    floats = [i for i, leaf in enumerate(jax.tree.leaves(params)) if is_float(leaf)]
    if len(blocks) != processes or sorted(i for block in blocks for i in block) != floats:
        raise ValueError(
            f"blocks must share out all floating-point leaves among {processes} processes, got "
            f"{list(blocks)}; use partition(params, {processes})."
        )


def _layer(path: tuple[Any, ...], position: int) -> Any:
    """What tells a layer from the others: the path of its container."""
    if path and getattr(path[-1], "name", None) == "value":  # flax.nnx: an array is in a variable
        path = path[:-1]
    if not path or isinstance(path[-1], jax.tree_util.SequenceKey):
        return position
    return path[:-1] or position
