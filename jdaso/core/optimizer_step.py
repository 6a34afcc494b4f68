"""One step of an optimizer with an averaging: the local update, and the move of the parameters.

:func:`apply_step` changes the parameters in place. :func:`link` makes an optax transformation of
it, which returns updates. Updates must exist in memory, so a link costs a copy of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdaso.core.exchange import Exchange
from jdaso.core.state import AveragingState
from jdaso.core.sync_target import AFTER_UPDATE, BEFORE_UPDATE
from jdaso.core.transformation import Averaging, Engine
from jdaso.core.tree import add_updates, conditional, where_tree
from jdaso.core.types import ParamsWithMoments, PyTree


class Step(NamedTuple):
    """The result of :func:`apply_step`.

    Attributes:
        params: after the step.
        optimizer: state of the local optimizer.
        averaging: state of the averaging.
        updates: that make the step, or None if they were not asked for.
    """

    params: PyTree
    optimizer: PyTree
    averaging: AveragingState
    updates: PyTree


def apply_step(
    engine: Engine,
    optimizer: optax.GradientTransformationExtraArgs,
    grads: PyTree,
    state: tuple[PyTree, AveragingState],
    params: PyTree,
    moments: Moments | None = None,
    updates_needed: bool = False,
    value: Any = None,
    **extra_args: Any,
) -> Step:
    """Updates the parameters with a local optimizer, and merges and posts what is due.

    If the gradients are not finite, the optimizer's state stays unchanged.

    Args:
        state: of the optimizer and of the averaging.
        moments: how to read and replace the optimizer's moments, if they are averaged as well.
        updates_needed: whether the result must have updates, which cost memory.
    """
    _check_gradients(engine.name, grads, params, value)
    old, averaging = state
    target = engine.sync_target
    finite = engine.guard(grads, averaging)

    def local(tree, params, old, grads):
        """The tree after an update that is computed at ``params``, the state, and the update."""
        updates, new = optimizer.update(grads, old, params, value=value, **extra_args)
        return (add_updates(tree, updates) if params is not None else None), new, updates

    if target.of_gradients:
        grads, averaging = engine.move(grads, averaging, finite, value, params)
        params, new, updates = local(params, params, old, grads)
        return Step(params, new, averaging, updates)
    if params is None:
        raise ValueError(f"{engine.name} moves parameters: call update(updates, state, params).")
    # Only parameters can be moved in place. Another target, such as the gradients that MDOWNPOUR
    # sends for new parameters, says with its functions how updates are made of what is exchanged.
    updates_needed = updates_needed or target not in (AFTER_UPDATE, BEFORE_UPDATE)
    if target is BEFORE_UPDATE and not updates_needed:
        # The update is added to the merged parameters, so that it needs no memory of its own.
        tree, averaging = engine.move(params, averaging, finite, value)
        params, new = _if(finite, local, tree, params, old, grads)
        return Step(params, new, averaging, None)
    origin = params if updates_needed else None
    if updates_needed:
        _, new, updates = local(params, params, old, grads)
        tree, new = _where_finite(finite, updates, params), where_tree(finite, new, old)
    else:
        tree, new = _if(finite, local, params, params, old, grads)
    if moments is not None:
        read = moments.read(new, params)
        tree = ParamsWithMoments(tree, read)
        origin = None if origin is None else ParamsWithMoments(origin, read)
    wire = None if moments is None else moments.wire
    tree, averaging = engine.move(tree, averaging, finite, value, origin=origin, moments_wire=wire)
    if moments is not None:
        new = moments.replace(new, tree.moments)
        tree = tree.params
    if updates_needed:
        return Step(add_updates(params, tree), new, averaging, tree)
    return Step(tree, new, averaging, None)


def _check_gradients(name: str, grads: PyTree, params: PyTree, value: Any) -> None:
    """Raises ValueError for a loss that is no scalar, and gradients of another tree or shape."""
    if value is not None and jnp.shape(value) != ():
        raise ValueError(
            f"{name}: value must be the loss, a scalar, got the shape {jnp.shape(value)}: pass "
            "its mean, which is also what the gradients belong to."
        )
    if params is None:
        return
    own, given = _shapes(params), _shapes(grads)
    if given.keys() - own.keys():
        raise ValueError(
            f"{name}: gradients must be a tree like params, got a leaf "
            f"{min(given.keys() - own.keys())!r} that params does not have; it has "
            f"{', '.join(sorted(own)[:4])}, ..."
        )
    if own.keys() - given.keys():
        raise ValueError(
            f"{name}: gradients must be a tree like params, got none for the leaf "
            f"{min(own.keys() - given.keys())!r}: pass zeros for it."
        )
    for path, shape in given.items():
        if None not in (shape, own[path]) and shape != own[path]:
            raise ValueError(
                f"{name}: gradients must have the shapes of params, got {shape} at {path!r}, where "
                f"params has {own[path]}."
            )


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...] | None]:
    """The shape of each leaf by its path. A leaf may be None."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    return {
        jax.tree_util.keystr(path): None if leaf is None else jnp.shape(leaf)
        for path, leaf in leaves
    }


def _if(
    condition: jax.Array,
    local: Callable,
    tree: PyTree,
    params: PyTree,
    state: PyTree,
    grads: PyTree,
) -> tuple[PyTree, PyTree]:
    """Tree and state of ``local(tree, params, state, grads)``, or both unchanged.

    With ``lax.cond``, XLA changes both in place. ``jnp.where`` would read the old values again, so
    XLA would copy them. XLA also copies them if the changing branch is the second, so ``change`` is
    the first.
    """
    like = jax.eval_shape(local, tree, params, state, grads)[:2]

    def change(*operands):
        return local(*operands)[:2]

    def keep(tree, params, state, grads):
        # An optimizer may widen its state at the first step.
        return jax.tree.map(lambda x, y: x.astype(y.dtype), (tree, state), like)

    return conditional("jdaso.chain", condition, change, keep, tree, params, state, grads)


class Moments(NamedTuple):
    """How to read an optimizer's moments from its state, how to replace them, and their wire.

    Attributes:
        read: ``(state, params) -> moments``.
        replace: ``(state, moments) -> state``.
    """

    read: Callable[[PyTree, PyTree], list[PyTree]]
    replace: Callable[[PyTree, list[PyTree]], PyTree]
    wire: str | None


def _where_finite(finite: jax.Array, updates: PyTree, params: PyTree) -> PyTree:
    """The updates, or zeros where there are none or the gradients are not finite."""

    def choose(x, update):
        if x is None:
            return update
        return jnp.zeros_like(x) if update is None else jnp.where(finite, update, 0)

    return jax.tree.map(choose, params, updates, is_leaf=lambda x: x is None)


def link(
    engine: Engine,
    exchange: Exchange,
    init: Callable[[PyTree], AveragingState],
    finish: Callable[[PyTree, AveragingState], tuple[PyTree, AveragingState]],
) -> Averaging:
    """An averaging as the last link of an optax chain, or the first if it averages gradients.

    It does not see the chain that contains it, so nothing checks its place.
    """
    nothing = optax.with_extra_args_support(optax.identity())

    def update(updates, state, params=None, **extra_args):
        nested = (optax.EmptyState(), state)
        step = apply_step(
            engine, nothing, updates, nested, params, updates_needed=True, **extra_args
        )
        return step.updates, step.averaging

    return Averaging(init, update, finish, AveragingState, exchange, engine=engine)
