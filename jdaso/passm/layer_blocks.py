"""Partition of the parameters into blocks of consecutive layers, one for each process."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdaso.core.tree import is_float, near_equal
from jdaso.core.types import PyTree
from jdaso.core.validation import check_whole

Block = tuple[int, ...]


def partition(params: PyTree, num_blocks: int, order: Sequence[int] | None = None) -> list[Block]:
    """Blocks of consecutive layers with near-equal numbers of weights (passm Sec. 4).

    The arrays that an innermost dictionary or module holds are one layer, such as a kernel and its
    bias. Each array of a list, or of the tree itself, is a layer. Layers are not divided. A block
    therefore differs from its share of the weights by at most the largest layer.

    Args:
        params: Arrays. Arrays of integers and booleans belong to no block.
        num_blocks: Number of blocks, one for each process; c in the paper.
        order: Positions of the leaves from input to output, from :func:`order_of_use`. None: the
            order of the tree.

    Returns:
        For each block the positions of its arrays in ``jax.tree.leaves(params)``, ascending. The
        first block is next to the input.

    Raises:
        ValueError: For fewer than one block, more blocks than layers, or an order that does not
            contain every position once.

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
            f"order must contain each of the {len(leaves)} positions in jax.tree.leaves(params) "
            f"once, got {list(order)}; use order_of_use(loss_fn, params, *batch)."
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
    """Raises ValueError unless each leaf is in one block and each process has as many blocks."""
    floats = [i for i, leaf in enumerate(jax.tree.leaves(params)) if is_float(leaf)]
    equal = blocks and len(blocks) % processes == 0
    if not equal or sorted(i for block in blocks for i in block) != floats:
        raise ValueError(
            f"blocks must divide all floating-point leaves among {processes} processes, the same "
            f"number of blocks for each, got {list(blocks)}; use partition(params, {processes}), "
            f"or a multiple of {processes}."
        )


def _layer(path: tuple[Any, ...], position: int) -> Any:
    """A key that is equal for the leaves of one layer: the path of their container."""
    if path and getattr(path[-1], "name", None) == "value":  # flax.nnx wraps an array in a variable
        path = path[:-1]
    if not path or isinstance(path[-1], jax.tree_util.SequenceKey):
        return position
    return path[:-1] or position
