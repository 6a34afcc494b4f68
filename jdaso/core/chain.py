"""Chains of an optimizer and an averaging, and three ways to treat the optimizer's moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jdaso.core.optimizer_step import Moments, apply_step
from jdaso.core.transformation import Averaging
from jdaso.core.tree import is_float, is_masked
from jdaso.core.types import ParamsWithMoments, PyTree
from jdaso.core.validation import check_choice


class ChainState(NamedTuple):
    """The states of the local optimizer and of the averaging."""

    optimizer: PyTree
    averaging: PyTree


def chain(
    optimizer: optax.GradientTransformation, averaging: Averaging, moments: str = "local"
) -> Averaging:
    """Chains an optimizer and an averaging, with a rule for the optimizer's moments at a merge.

    Moments are the parts of the optimizer's state that have the shape of the parameters: momentum,
    or m and v of Adam. The papers do not average them: after a merge, training continues with the
    moments from before. If a step is skipped because it is not finite, the optimizer's whole state
    stays unchanged, which ``optax.chain`` cannot do.

    Args:
        optimizer: the local optimizer, any optax transformation.
        averaging: what ``jdaso.daso(...)`` or another algorithm returned.
        moments: ``local`` keeps each node's own moments. ``average`` sends them together with the
            parameters, which at least doubles the bytes, and merges them with the same weight w of
            a node's own: ``m <- w m + (1 - w) mean_i m_i``. ``reset`` initializes them after each
            merge, together with their step counts (Adam's), but not the counts of learning rates.

    Returns:
        An optax transformation. :func:`jdaso.drain` takes it in place of ``averaging``.

    Raises:
        ValueError: for another value of ``moments``, or one other than ``local`` with EASGD or
            averaged gradients. In ``init``, for ``reset`` with several fragments.

    >>> import jdaso, optax
    >>> averaging = jdaso.local_sgd(jdaso.single_exchange(), period=8)
    >>> tx = jdaso.chain(optax.sgd(0.1, momentum=0.9), averaging, moments="average")
    """
    if isinstance(moments, optax.GradientTransformation):
        raise ValueError(
            "jdaso.chain takes one optimizer and one averaging, got three transformations: put the "
            "first two into optax.chain, as in jdaso.chain(optax.chain(clip, sgd), averaging)."
        )
    engine = averaging.engine if isinstance(averaging, Averaging) else None
    if engine is None:
        raise ValueError(
            "averaging must be what jdaso.daso(...) or another algorithm returned, not a chain or "
            f"an optimizer, got an object of type {type(averaging).__name__}: pass several "
            "optimizers as one optax.chain, and use eamsgd, which contains its optimizer, alone."
        )
    check_choice("moments", moments, ("local", "average", "reset"))
    if moments != "local" and not engine.moves_moments:
        raise ValueError(
            f"moments must be 'local' with this algorithm, got {moments!r}: the algorithm does not "
            "replace a node's parameters by a mean."
        )
    optimizer = optax.with_extra_args_support(optimizer)
    averaged = Moments(
        lambda state: _moments(optimizer, state),
        lambda state, moved: _replaced(optimizer, state, moved),
    )

    def with_moments(params: PyTree, state: PyTree) -> PyTree:
        return ParamsWithMoments(params, averaged.read(state)) if moments == "average" else params

    def init(params: PyTree) -> ChainState:
        state = optimizer.init(params)
        inner = averaging.init(with_moments(params, state))
        if moments == "reset" and len(inner.fragments) > 1:
            raise ValueError(
                f"moments='reset' requires fragments=1, got {len(inner.fragments)}: the merge of "
                "one fragment would reset the moments of all."
            )
        return ChainState(state, inner)

    def step(grads, state, params, updates_needed, extra_args):
        result = apply_step(
            engine,
            optimizer,
            grads,
            state,
            params,
            averaged if moments == "average" else None,
            updates_needed,
            **extra_args,
        )
        new = result.optimizer
        if moments == "reset":
            new = _reset_if(result.averaging.merged, optimizer, new, result.params)
        return result, ChainState(new, result.averaging)

    def apply(grads, state, params, **extra_args):
        result, state = step(grads, state, params, False, extra_args)
        return result.params, state

    def update(grads, state, params=None, **extra_args):
        result, state = step(grads, state, params, True, extra_args)
        return result.updates, state

    def finish(params, state):
        old, inner = state
        in_flight = jnp.stack([fragment.posted for fragment in inner.fragments]).any()
        merged, inner = averaging.finish(with_moments(params, old), inner)
        if moments == "average":
            return merged.params, ChainState(_replaced(optimizer, old, merged.moments), inner)
        if moments == "reset":
            old = _reset_if(in_flight, optimizer, old, merged)
        return merged, ChainState(old, inner)

    return Averaging(init, update, finish, ChainState, averaging.exchange, apply)


def _map_moments(
    function: Callable[[PyTree], Any],
    optimizer: optax.GradientTransformation,
    state: PyTree,
    **options: Any,
) -> PyTree:
    """Maps a function over the trees of a state that are like the parameters."""
    return optax.tree_map_params(optimizer, function, state, is_leaf=lambda _: True, **options)


def _moments(optimizer: optax.GradientTransformation, state: PyTree) -> list[PyTree]:
    """The moments, with :class:`optax.MaskedNode` in place of leaves that are not averaged."""
    found: list[PyTree] = []
    _map_moments(found.append, optimizer, state)
    return jax.tree.map(lambda x: x if is_float(x) else optax.MaskedNode(), found)


def _replaced(
    optimizer: optax.GradientTransformation, state: PyTree, moments: list[PyTree]
) -> PyTree:
    rest = iter(moments)

    def replace(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda new, old: old if is_masked(new) else new, next(rest), tree, is_leaf=is_masked
        )

    return _map_moments(replace, optimizer, state)


def _reset_if(
    condition: jax.Array, optimizer: optax.GradientTransformation, state: PyTree, params: PyTree
) -> PyTree:
    """Resets the moments of an optimizer's state if the condition holds."""
    moments = _map_moments(lambda _: True, optimizer, state, transform_non_params=lambda _: False)
    return lax.cond(
        condition, lambda: _reset(state, optimizer.init(params), moments), lambda: state
    )


def _reset(state: PyTree, fresh: PyTree, moments: PyTree) -> PyTree:
    """Replaces each state that has moments among its fields by the initial one, ``fresh``."""
    if moments is True:
        return fresh
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        if any(field is True for field in moments):
            return fresh
        return type(state)(*map(_reset, state, fresh, moments))
    if isinstance(state, tuple | list):
        return type(state)(map(_reset, state, fresh, moments))
    if isinstance(state, dict):
        return {key: _reset(state[key], fresh[key], moments[key]) for key in state}
    return state
