"""Chains of an optimizer and an averaging, and three ways to treat the optimizer's moments."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import optax

from jdaso.core.block_format import FORMATS
from jdaso.core.moments import (
    check_moments,
    check_reset,
    read_moments,
    replace_moments,
    reset_moments_if,
    warn_of_copies,
)
from jdaso.core.optimizer_step import Moments, apply_step
from jdaso.core.transformation import Averaging, Engine
from jdaso.core.types import ParamsWithMoments, PyTree
from jdaso.core.validation import check_choice

#: The wires that moments may be rounded to.
MOMENTS_WIRES = ("float32", "bfloat16", "float16")


class ChainState(NamedTuple):
    """The states of the local optimizer and of the averaging."""

    optimizer: PyTree
    averaging: PyTree


def chain(
    optimizer: optax.GradientTransformation,
    averaging: Averaging,
    moments: str = "local",
    moments_wire: str | None = None,
) -> Averaging:
    """Chains an optimizer and an averaging, with a rule for the optimizer's moments at a merge.

    Moments are the parts of the optimizer's state that are trees like the parameters: momentum,
    or m and v of Adam. The papers do not average them: after a merge, training continues with the
    moments from before. If a step is skipped because it is not finite, the optimizer's whole state
    stays unchanged, which ``optax.chain`` cannot do.

    Args:
        optimizer: the local optimizer, any optax transformation.
        averaging: what ``jdaso.daso(...)`` or another algorithm returned.
        moments: ``local`` keeps each node's own moments. ``average`` sends them together with the
            parameters, which at least doubles the bytes, and merges them with the same weight w of
            a node's own: ``m <- w m + (1 - w) mean_i m_i``. The moments of integers stay local.
            ``reset`` initializes them after each merge to which a node has contributed, together
            with their step counts (Adam's). It keeps the counts of learning-rate schedules,
            learning rates that the optimizer has estimated, and gradients that
            ``optax.MultiSteps`` is accumulating.
        moments_wire: the wire of averaged moments, whatever that of the parameters is. None sends
            them in float32, and those in float64 as they are. ``bfloat16`` and ``float16`` send
            half of the bytes. bfloat16 loses what grows by less than 1/256, such as the sums of
            Adagrad. In float16, numbers below 6e-8, such as the v of small gradients, become 0.
            int8 and float4 would make numbers negative whose root an optimizer takes.

    Returns:
        An optax transformation. :func:`jdaso.drain` takes it in place of ``averaging``.

    Raises:
        ValueError: for another value of ``moments``, or one other than ``local`` with EASGD or
            averaged gradients; for another ``moments_wire``, or one without ``average``. In
            ``init``, for ``reset`` with several fragments, for ``reset`` with an optimizer that has
            one count for its moments and its learning rate, and where the optimizer's state does
            not show which of its parts are moments.

    >>> import jdaso, optax
    >>> averaging = jdaso.local_sgd(jdaso.single_exchange(), period=8)
    >>> tx = jdaso.chain(optax.sgd(0.1, momentum=0.9), averaging, moments="average")
    """
    engine = _check_arguments(averaging, moments, moments_wire)
    optimizer = optax.with_extra_args_support(optimizer)
    averaged = Moments(
        functools.partial(read_moments, optimizer),
        functools.partial(replace_moments, optimizer),
        moments_wire,
    )

    def with_moments(params: PyTree, state: PyTree) -> PyTree:
        if moments != "average":
            return params
        return ParamsWithMoments(params, averaged.read(state, params))

    def init(params: PyTree) -> ChainState:
        state = optimizer.init(params)
        if moments == "local":
            warn_of_copies(state, params)
        else:
            check_moments(optimizer, state, params if moments == "average" else None)
        if moments == "reset":
            check_reset(state)
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
            new = reset_moments_if(result.averaging.merged, optimizer, new, result.params)
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
            return merged.params, ChainState(averaged.replace(old, merged.moments), inner)
        if moments == "reset":
            old = reset_moments_if(in_flight & inner.merged, optimizer, old, merged)
        return merged, ChainState(old, inner)

    return Averaging(init, update, finish, ChainState, averaging.exchange, apply)


def _check_arguments(averaging: Averaging, moments: str, moments_wire: str | None) -> Engine:
    """Raises ValueError for what :func:`chain` does not take. Returns the engine to chain with."""
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
    if moments_wire in FORMATS:
        raise ValueError(
            f"moments_wire must be one of {', '.join(MOMENTS_WIRES)} or None, got "
            f"{moments_wire!r}, which sends differences: their rounding errors would make numbers "
            "negative whose root an optimizer takes, such as the v of Adam. Only the parameters "
            "can be sent in int8 and float4."
        )
    if moments_wire is not None:
        check_choice("moments_wire", moments_wire, MOMENTS_WIRES)
        if moments != "average":
            raise ValueError(
                f"moments_wire requires moments='average', got {moments_wire!r} with "
                f"moments={moments!r}, which sends no moments."
            )
    if moments != "local" and not engine.moves_moments:
        raise ValueError(
            f"moments must be 'local' with this algorithm, got {moments!r}: the algorithm does not "
            "replace a node's parameters by a mean."
        )
    return engine
