"""The floating-point leaves of a tree: finding them, replacing them, arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdaso._base import Leaves, PyTree
from jdaso._wire import sum_dtype


def is_float(leaf) -> bool:
    """Whether a leaf takes part in exchanges; integers and booleans stay as they are.

    Raises:
        ValueError: for complex leaves, which no wire format is defined for.
    """
    if jnp.issubdtype(jnp.result_type(leaf), jnp.complexfloating):
        raise ValueError(
            f"complex parameters are not supported, got a leaf of dtype {jnp.result_type(leaf)}; "
            "keep real and imaginary parts as two leaves."
        )
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)


def all_finite(leaves) -> jax.Array:
    """Whether every number in a list of arrays is finite, in one pass over them.

    One that is not makes their sum so, too. That numbers which are finite add up to infinity
    takes some of 1e30 and more, and counts as not finite as well.
    """
    sums = [jnp.sum(leaf, dtype=sum_dtype(leaf.dtype)) for leaf in leaves]
    # In one array: a chain of "and" XLA fuses into every use of it, each time as a whole, and
    # compiles half a minute for 300 leaves.
    return jnp.all(jnp.isfinite(jnp.stack(sums))) if sums else jnp.bool_(True)


def float_leaves(tree) -> list[jax.Array]:
    """The leaves of a tree that take part in exchanges."""
    return [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def split(tree: PyTree) -> tuple[Leaves, Callable[[Leaves], PyTree]]:
    """The floating-point leaves of a tree, and the function that puts others in their place."""
    leaves, treedef = jax.tree.flatten(tree)

    def where(floats: Leaves) -> PyTree:
        rest = iter(floats)
        return jax.tree.unflatten(treedef, [next(rest) if is_float(x) else x for x in leaves])

    return [x for x in leaves if is_float(x)], where


def difference(params: Leaves, updates: Leaves, moved: Leaves) -> Leaves:
    """The updates that lead from params to moved, in the dtypes of the updates.

    Parameters that are not finite count as 0, as in :func:`jdaso.apply_updates`.
    """
    return [
        (m.astype(sum_dtype(p.dtype)) - known(p).astype(sum_dtype(p.dtype))).astype(u.dtype)
        for p, u, m in zip(params, updates, moved, strict=True)
    ]


def known(leaf: jax.Array) -> jax.Array:
    """The leaf with 0 for what is not finite: no update could lead away from there."""
    return jnp.where(jnp.isfinite(leaf), leaf, jnp.zeros_like(leaf))


def widened(tree: PyTree) -> PyTree:
    """The tree with its floating-point leaves in the dtype in which they are added up."""
    return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)) if is_float(x) else x, tree)


def divide(numerator, denominator):
    """Numerator over a scalar denominator, without a bias.

    XLA turns the division by a scalar into a product with its rounded reciprocal, which errs
    in one direction for every number: too little to see once, but it adds up over thousands of
    means. One step of Newton's method on the quotient takes the bias away.
    """
    quotient = numerator / denominator
    return quotient + (numerator - quotient * denominator) / denominator


def outline(params: PyTree) -> list[str]:
    """Path, dtype and shape of every leaf, as text that can be compared and shown."""
    return [
        f"{jax.tree_util.keystr(path) or 'params'}: {jnp.result_type(leaf).name}{jnp.shape(leaf)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
