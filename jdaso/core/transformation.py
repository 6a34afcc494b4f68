"""The type of all averaging transformations, which :func:`jdaso.drain` accepts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jdaso.core.exchange import Exchange
from jdaso.core.state import AveragingState
from jdaso.core.sync_target import SyncTarget
from jdaso.core.types import PyTree


class Engine(NamedTuple):
    """The parts of a step in which an averaging takes part.

    Attributes:
        name: of the algorithm, for error messages.
        guard: ``(grads, state) -> bool``, whether the gradients are finite.
        move: ``(tree, state, finite, value, replicated, origin, moments_wire) -> (tree, state)``,
            merges and posts what is due.
        moves_moments: whether :func:`jdaso.chain` may average the optimizer's moments as well.
    """

    name: str
    sync_target: SyncTarget
    guard: Callable[[PyTree, AveragingState], jax.Array]
    move: Callable[..., tuple[PyTree, AveragingState]]
    moves_moments: bool


class Averaging(optax.GradientTransformationExtraArgs):
    """An optax transformation that averages between nodes.

    In an ``optax.chain`` an averaging of parameters must be the last member, and one of gradients
    the first; :func:`jdaso.chain` leaves no choice. What stands behind an averaging of parameters
    changes the merged updates, and nodes drift apart. No error says so, because optax does not tell
    a transformation where it stands, but :func:`jdaso.drift` shows it: after a blocking merge it is
    0 or nearly so only if the averaging is last.

    Attributes:
        finish: ``(params, state) -> (params, state)``, merges the exchanges in flight.
        state_type: type of the state that ``finish`` takes.
        exchange: how it communicates.
        apply: ``(grads, state, params, **extra_args) -> (params, state)`` of a whole optimizer,
            which changes the parameters in place. None if an optimizer is missing.
        engine: for :func:`jdaso.chain`. None if there is nothing to chain.
    """

    finish: Callable[[PyTree, Any], tuple[PyTree, Any]]
    state_type: type
    exchange: Exchange
    apply: Callable[..., tuple[PyTree, Any]] | None
    engine: Engine | None

    def __new__(cls, init, update, finish, state_type, exchange, apply=None, engine=None):
        self = super().__new__(cls, init, _compiled_outside_jit(update))
        self.finish = finish
        self.state_type = state_type
        self.exchange = exchange
        self.apply = apply and _compiled_outside_jit(apply)
        self.engine = engine
        return self


def _compiled_outside_jit(function: Callable) -> Callable:
    """The function, which is compiled where nothing traces it.

    Outside jit, each of its conditionals would be traced and compiled again at every call.
    """
    compiled = jax.jit(function)

    @functools.wraps(function)
    def call(grads, state, params=None, **extra_args):
        leaves = jax.tree.leaves((grads, state, params, extra_args))
        concrete = all(isinstance(x, jax.Array | np.ndarray | np.generic | float) for x in leaves)
        traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
        return (compiled if concrete and not traced else function)(
            grads, state, params, **extra_args
        )

    return call
