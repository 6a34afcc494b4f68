"""Restricted backpropagation: the subgradient of one block of the parameters."""

from __future__ import annotations

from collections.abc import Callable

import jax
import optax

from jdaso._base import PyTree
from jdaso.passm._blocks import Block


def restricted_value_and_grad(loss_fn: Callable, block: Block, has_aux: bool = False) -> Callable:
    """Like ``jax.value_and_grad``, with the subgradient of a block only (passm Sec. 4).

    The layers below the block need no backward pass, and those above it no subgradients of their
    weights: they are not part of the program. With c processes and F operations of a whole
    backward pass, Appendix D of the paper counts F (c-1) / 2 that c processes save; Sec. 4 has
    another number, F (c-1)(c-2) / c. Both leave out the subgradients of weights above a block:
    more is saved than Appendix D counts.

    Args:
        loss_fn: ``(params, *args) -> loss`` or, with ``has_aux``, ``(loss, aux)``.
        block: positions of leaves, one of those of :func:`partition`.
        has_aux: as in ``jax.value_and_grad``.

    Returns:
        ``(params, *args) -> (loss, grads)``, or ``((loss, aux), grads)``. ``grads`` is a tree like
        params with :class:`optax.MaskedNode` in place of all leaves that are not in the block.

    >>> import jax.numpy as jnp
    >>> value_and_grad = restricted_value_and_grad(lambda p, x: p["a"] * p["b"] * x, block=(1,))
    >>> loss, grads = value_and_grad({"a": jnp.float32(2), "b": jnp.float32(3)}, 5.0)
    >>> float(loss), float(grads["b"]), jax.tree.leaves(grads["a"])
    (30.0, 10.0, [])
    """

    def call(params: PyTree, *args: PyTree):
        leaves, structure = jax.tree.flatten(params)

        def of_block(inside: list[jax.Array], *args: PyTree):
            whole = list(leaves)
            for position, leaf in zip(block, inside, strict=True):
                whole[position] = leaf
            return loss_fn(jax.tree.unflatten(structure, whole), *args)

        inside = [leaves[position] for position in block]
        value, grads = jax.value_and_grad(of_block, has_aux=has_aux)(inside, *args)
        places: list = [optax.MaskedNode()] * len(leaves)
        for position, grad in zip(block, grads, strict=True):
            places[position] = grad
        return value, jax.tree.unflatten(structure, places)

    return call
