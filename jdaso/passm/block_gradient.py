"""Restricted backpropagation: the subgradient of one block of the parameters."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from jdaso.core.types import PyTree
from jdaso.passm.layer_blocks import Block


def restricted_value_and_grad(loss_fn: Callable, block: Block, has_aux: bool = False) -> Callable:
    """Like ``jax.value_and_grad``, with the subgradient of one block only (passm Sec. 4).

    Layers below the block have no backward pass. Layers above it have no subgradients of their
    weights. With c processes and F operations of a whole backward pass, the paper counts savings
    of F (c-1) / 2 for one step of each process in Appendix D, and F (c-1)(c-2) / c in Sec. 4; the
    two agree for its c = 4 and for no other c above 1. Both leave out the subgradients of weights
    above a block, so the real savings are larger.

    Args:
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
        block: Positions of leaves, one of the blocks of :func:`partition`.
        has_aux: As in ``jax.value_and_grad``.

    Returns:
        ``(params, *args) -> (loss, grads)``, or ``((loss, aux), grads)``. ``grads`` is a tree like
        params with :class:`optax.MaskedNode` in place of all leaves that are not in the block.

    >>> import jax.numpy as jnp
    >>> value_and_grad = restricted_value_and_grad(lambda p, x: p["a"] * p["b"] * x, block=(1,))
    >>> loss, grads = value_and_grad({"a": jnp.float32(2), "b": jnp.float32(3)}, 5.0)
    >>> float(loss), float(grads["b"]), jax.tree.leaves(grads["a"])
    (30.0, 10.0, [])
    """

    def value_and_grad(params: PyTree, *args: PyTree):
        leaves, structure = jax.tree.flatten(params)
        whole = functools.partial(with_leaves, structure, leaves, block)
        value, grads = jax.value_and_grad(
            lambda inside, *args: loss_fn(whole(inside), *args), has_aux=has_aux
        )([leaves[position] for position in block], *args)
        return value, with_leaves(structure, [optax.MaskedNode()] * len(leaves), block, grads)

    return value_and_grad


def with_leaves(
    structure: Any, leaves: Sequence[Any], positions: Block, replacements: Sequence[Any]
) -> PyTree:
    """A tree of these leaves, some of which are replaced."""
    replaced = dict(enumerate(leaves)) | dict(zip(positions, replacements, strict=True))
    return jax.tree.unflatten(structure, replaced.values())
