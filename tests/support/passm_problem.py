"""A nonsmooth loss of five arrays in three layers, and its subgradient in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

ROWS, WEIGHT = 8, 0.01
SHAPES = {
    "first": {"bias": (2,), "kernel": (2, 3)},
    "head": (3,),
    "second": {"bias": (), "w": (4,)},
}


def first_params() -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def flat(params) -> np.ndarray:
    return np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(params)])


def places(params) -> list[np.ndarray]:
    """The indices of each leaf in the result of :func:`flat`."""
    ends = np.cumsum([np.size(x) for x in jax.tree.leaves(params)])
    return np.split(np.arange(ends[-1]), ends[:-1])


def batch(process: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((process, step))
    n = len(flat(first_params()))
    return rng.normal(size=(ROWS, n)).astype("f4"), rng.normal(size=ROWS).astype("f4")


def loss_fn(params, a, b):
    """|A x - b|^2 / (2 rows) + w |x|_1, with x in the order of the tree."""
    x = jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])
    return jnp.mean((a @ x - b) ** 2) / 2 + WEIGHT * jnp.abs(x).sum()


def gradient(x: np.ndarray, process: int, step: int) -> np.ndarray:
    a, b = (array.astype(np.float64) for array in batch(process, step))
    return a.T @ (a @ x - b) / ROWS + WEIGHT * np.sign(x)
