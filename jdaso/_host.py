"""Trees as named arrays in the memory of the host, and back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jdaso._base import PyTree

_SHOWN = 5  # names in an error


def named(tree: PyTree) -> dict[str, np.ndarray]:
    """Copies of a tree's leaves by their paths; those without elements are left out.

    Copies, since the arrays of a CPU may be donated to the next step while they are written.

    Raises:
        ValueError: for a leaf that is no array of numbers, such as a typed random key.

    >>> named({"layer": [jnp.ones(2), 3]})
    {'layer.0': array([1., 1.], dtype=float32), 'layer.1': array(3)}
    """
    arrays = {}
    for name, leaf in _with_names(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(f"{name} is a typed random key; save jax.random.key_data of it.")
        array = np.array(leaf)
        if not (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number)):
            raise ValueError(f"{name} is no array and no number, got {leaf!r}.")
        if name in arrays:
            raise ValueError(f"two leaves are called {name}; name them differently.")
        if array.size:
            arrays[name] = array
    return arrays


def put_back(arrays: dict[str, np.ndarray], like: PyTree, source: str) -> PyTree:
    """A tree like another one, with the values, and placed as the other one is.

    Args:
        arrays: what :func:`named` has returned.
        like: a tree of arrays and Python numbers.
        source: where the arrays come from, for the error.

    Raises:
        ValueError: if names, shapes or dtypes differ; names the first that do.
    """
    wanted = {name: leaf for name, leaf in _with_names(like) if np.size(leaf)}
    wrong = [f"{name} is missing" for name in wanted if name not in arrays]
    wrong += [f"{name} is not asked for" for name in arrays if name not in wanted]
    for name in wanted.keys() & arrays.keys():
        old, new = arrays[name], np.asarray(wanted[name])
        if old.shape != new.shape or (
            isinstance(wanted[name], jax.Array) and old.dtype != new.dtype
        ):
            wrong.append(f"{name} is {old.dtype}{old.shape}, asked for is {new.dtype}{new.shape}")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ValueError(
            f"{source} does not fit the state it is restored into: "
            f"{'; '.join(sorted(wrong)[:_SHOWN])}{more}. Build model and optimizer as when it was "
            "saved."
        )
    leaves = [_placed(arrays[n], x) if np.size(x) else x for n, x in _with_names(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _placed(value: np.ndarray, like):
    if isinstance(like, jax.Array):
        return jax.device_put(value, like.sharding)
    return value if isinstance(like, np.ndarray) else type(like)(value)


def _with_names(tree: PyTree):
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]
