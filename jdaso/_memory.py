"""What becomes of an optimizer's memory, momentum for instance, when parameters are merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdaso._base import PyTree, Remembering
from jdaso._engine import Averaging
from jdaso._leaves import is_float
from jdaso._state import AveragingState

MOMENTS = ("local", "average", "reset")


class MemoryState(NamedTuple):
    """State of the local optimizer, and of what averages between nodes."""

    optimizer: PyTree
    averaging: PyTree


def chain(
    optimizer: optax.GradientTransformation, averaging: Averaging, moments: str = "local"
) -> Averaging:
    """Like ``optax.chain`` of the two, with a rule for the optimizer's moments at a merge.

    Moments are what the optimizer remembers in the shape of the parameters: momentum, Adam's m
    and v. The papers leave them alone; parameters that have just been replaced by a mean go on
    with the momentum of those before. A step that is skipped, as it is not finite, leaves the
    optimizer's whole state as it was, which ``optax.chain`` cannot.

    Args:
        optimizer: the local optimizer, any optax transformation.
        averaging: what ``jdaso.daso(...)`` or a relative returned.
        moments: ``local`` leaves each node its own; ``average`` sends them with the parameters
            and merges them as these, ``m <- w m + (1 - w) mean_i m_i`` with the same weight w of
            a node's own, for twice the bytes or more; ``reset`` starts them anew after a merge,
            with the counts that belong to them (Adam's), while learning rates go on.

    Returns:
        An optax transformation, which :func:`jdaso.drain` takes in the place of ``averaging``.

    Raises:
        ValueError: for another word, and for any but ``local`` with EASGD and gradients; in
            ``init`` for ``reset`` with several fragments, of which each would reset the moments
            of all.

    >>> import jdaso, optax
    >>> averaging = jdaso.local_sgd(jdaso.single_exchange(), period=8)
    >>> tx = jdaso.chain(optax.sgd(0.1, momentum=0.9), averaging, moments="average")
    """
    if not isinstance(averaging, Averaging) or averaging.state_type is not AveragingState:
        raise ValueError(
            "jdaso.chain takes an optimizer, which may be an optax.chain of several, and an "
            "averaging: averaging must be what jdaso.daso(...) or a relative returned, and no "
            f"chain; eamsgd is a whole optimizer, which needs none before it. Got {averaging!r}."
        )
    if moments not in MOMENTS:
        raise ValueError(f"moments must be one of {', '.join(MOMENTS)}, got {moments!r}.")
    if moments != "local" and not averaging.moves_moments:
        raise ValueError(
            f"moments must be 'local' with this algorithm, got {moments!r}: where no mean replaces "
            "a node's parameters, the moments stay its own."
        )
    optimizer = optax.with_extra_args_support(optimizer)

    def with_memory(params: PyTree, state: PyTree) -> PyTree:
        if moments != "average":
            return params
        return Remembering(params, _moments(optimizer, state))

    def init(params: PyTree) -> MemoryState:
        state = optimizer.init(params)
        inner = averaging.init(with_memory(params, state))
        if moments == "reset" and len(inner.flights) > 1:
            raise ValueError(
                f"moments='reset' needs fragments=1, got {len(inner.flights)}: the merge of one "
                "fragment would reset the moments of all."
            )
        return MemoryState(state, inner)

    def update(updates, state, params=None, **extra_args):
        old, inner = state
        updates, new = optimizer.update(updates, old, params, **extra_args)
        if moments == "average":
            before, after = _moments(optimizer, old), _moments(optimizer, new)
            change = jax.tree.map(jnp.subtract, after, before)
            (updates, change), inner = averaging.update(
                Remembering(updates, change), inner, Remembering(params, before), **extra_args
            )
            skipped = inner.skipped > state.averaging.skipped
            new = _first_if(skipped, old, new)
            # Otherwise the change is what it was, and adding it again would only round.
            moved = inner.merged | skipped
            after = lax.cond(
                moved,
                lambda: jax.tree.map(jnp.add, before, change),
                lambda: after,
            )
            return updates, MemoryState(_replaced(optimizer, new, after), inner)
        updates, inner = averaging.update(updates, inner, params, **extra_args)
        new = _first_if(inner.skipped > state.averaging.skipped, old, new)
        if moments == "reset":
            now = optax.apply_updates(params, updates)
            new = _renewed_if(inner.merged, optimizer, new, now)
        return updates, MemoryState(new, inner)

    def finish(params, state):
        old, inner = state
        flying = jnp.stack([flight.posted for flight in inner.flights]).any()
        merged, inner = averaging.finish(with_memory(params, old), inner)
        if moments == "average":
            return merged.params, MemoryState(_replaced(optimizer, old, merged.memory), inner)
        if moments == "reset":
            old = _renewed_if(flying, optimizer, old, merged)
        return merged, MemoryState(old, inner)

    return Averaging(init, update, finish, state_type=MemoryState)


def _first_if(condition: jax.Array, first: PyTree, second: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), first, second)


def _map_moments(
    function: Callable[[PyTree], Any],
    optimizer: optax.GradientTransformation,
    state: PyTree,
    transform_non_params: Callable[[PyTree], Any] | None = None,
) -> PyTree:
    """The state with something else for each of its trees like the parameters."""
    return optax.tree_map_params(
        optimizer,
        function,
        state,
        transform_non_params=transform_non_params,
        is_leaf=lambda _: True,
    )


def _moments(optimizer: optax.GradientTransformation, state: PyTree) -> list[PyTree]:
    """Trees like the parameters, with :class:`optax.MaskedNode` for what is not averaged."""
    found: list[PyTree] = []
    _map_moments(found.append, optimizer, state)
    return jax.tree.map(lambda x: x if is_float(x) else optax.MaskedNode(), found)


def _replaced(
    optimizer: optax.GradientTransformation, state: PyTree, moments: list[PyTree]
) -> PyTree:
    """The state with other moments."""
    rest = iter(moments)

    def replace(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda new, old: old if _is_masked(new) else new, next(rest), tree, is_leaf=_is_masked
        )

    return _map_moments(replace, optimizer, state)


def _is_masked(node: PyTree) -> bool:
    return isinstance(node, optax.MaskedNode)


def _renewed_if(condition, optimizer: optax.GradientTransformation, state: PyTree, params: PyTree):
    moments = _map_moments(lambda _: True, optimizer, state, lambda _: False)
    return lax.cond(
        condition, lambda: _renewed(state, optimizer.init(params), moments), lambda: state
    )


def _renewed(state: PyTree, fresh: PyTree, moments: PyTree) -> PyTree:
    """Every state that has moments among its fields, fresh; the others as they are."""
    if moments is True:
        return fresh
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        if any(field is True for field in moments):
            return fresh
        return type(state)(*map(_renewed, state, fresh, moments))
    if isinstance(state, tuple | list):
        return type(state)(map(_renewed, state, fresh, moments))
    if isinstance(state, dict):
        return {key: _renewed(state[key], fresh[key], moments[key]) for key in state}
    return state
