"""Trees as named arrays in the memory of the host, and back."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdaso.cluster.mpi_types import Comm
from jdaso.core.chain import ChainState
from jdaso.core.exchange import Shards
from jdaso.core.state import AveragingState, map_states
from jdaso.core.tree import place_like
from jdaso.core.types import PyTree

_MAX_LISTED = 5  # differences in an error


def to_host_arrays(tree: PyTree) -> dict[str, np.ndarray | Shards]:
    """Copies the leaves of a tree to named arrays; leaves without elements are left out.

    Of an array that several processes hold, it copies the shards of this process. Of their copies,
    one process has the first.

    Views would not do: a CPU array may be donated to the next step while a thread writes it. It
    raises ValueError for a leaf that is not an array of numbers, such as a typed random key.

    >>> to_host_arrays({"layer": [jnp.ones(2), 3]})
    {'layer.0': array([1., 1.], dtype=float32), 'layer.1': array(3)}
    """
    arrays = {}
    for name, leaf in _named_leaves(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name} is a typed random key; save its jax.random.key_data.")
        array = _copy(leaf)
        if not (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)):
            raise ValueError(f"{name} must be an array of numbers or a number, got {leaf!r}.")
        if name in arrays:
            raise ValueError(f"two leaves have the name {name}; rename one of them.")
        if array.size:
            arrays[name] = array
    return arrays


def _copy(leaf: Any) -> np.ndarray | Shards:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.array(leaf)
    first = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    shards = [(shard.index, np.array(shard.data)) for shard in first]
    return Shards(leaf.shape, leaf.dtype, shards)


def gather_shards(comm: Comm | None, tree: PyTree) -> PyTree | None:
    """A tree with whole arrays in place of shards; None on all processes but the first.

    ``comm`` connects the processes that hold the shards. Without it, the tree has no shards.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, Shards))
    for i, leaf in enumerate(leaves):
        parts = comm.gather(leaf.shards) if comm and isinstance(leaf, Shards) else None
        if parts is not None:
            leaves[i] = leaf._replace(shards=list(chain.from_iterable(parts))).whole()
    return jax.tree.unflatten(treedef, leaves) if comm is None or comm.Get_rank() == 0 else None


def from_host_arrays(arrays: dict[str, np.ndarray], like: PyTree, source: str) -> PyTree:
    """The inverse of :func:`to_host_arrays`, with structure, types and placement of ``like``.

    ``like`` is a tree of arrays and Python numbers. If names, shapes or dtypes differ, it raises
    ValueError, which names the ``source`` of the arrays. An array of an optimizer's state keeps the
    dtype that it was saved with, because many optimizers change dtypes at the first step.
    """
    may_change = _optimizer_names(like)
    wanted = {name: leaf for name, leaf in _named_leaves(like) if np.size(leaf)}
    wrong = [f"{name} is not in the checkpoint" for name in wanted if name not in arrays]
    wrong += [f"{name} is not in the state" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        old, new = arrays[name], wanted[name]
        shape, dtype = np.shape(new), new.dtype if hasattr(new, "dtype") else np.result_type(new)
        fixed = isinstance(new, jax.Array) and name not in may_change
        if old.shape != shape or (fixed and old.dtype != dtype):
            wrong.append(f"{name} is {old.dtype}{old.shape}, the state has {dtype}{shape}")
    if wrong:
        more = f" and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        raise ValueError(
            f"{source} does not fit the state it is restored into: "
            f"{'; '.join(sorted(wrong)[:_MAX_LISTED])}{more}. Build the same model and optimizer "
            "as when it was saved. If a transformation of your own changes the dtype of its state "
            "at the first step, use this dtype in its init."
        )
    leaves = [_placed_like(x, arrays[n]) if np.size(x) else x for n, x in _named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _placed_like(like: Any, value: np.ndarray) -> Any:
    if isinstance(like, jax.Array | np.ndarray):
        return place_like(value, like)
    # An integer, such as a best loss of 0 at the start, may have become a float.
    keeps_value = np.can_cast(value.dtype, np.result_type(like), "same_kind")
    return type(like)(value) if keeps_value else value.item()


def _optimizer_names(tree: PyTree) -> set[str]:
    """The names of the arrays in the states of optimizers, without those of averagings."""

    def is_state(node: Any) -> bool:
        of_optax = type(node).__module__.partition(".")[0] == "optax"
        return isinstance(node, ChainState) or (
            of_optax and not isinstance(node, optax.LookaheadParams)
        )

    rest = map_states(AveragingState, lambda _: None, tree)
    nodes, _ = jax.tree_util.tree_flatten_with_path(rest, is_leaf=is_state)
    return {
        name_of([*path, *inside])
        for path, node in nodes
        if is_state(node)
        for inside, _ in jax.tree_util.tree_leaves_with_path(node)
    }


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(name_of(path), leaf) for path, leaf in paths]


def name_of(path: Sequence[Any]) -> str:
    """The name of the leaf at a path of ``jax.tree_util``."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")
