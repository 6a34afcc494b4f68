"""Averagings as optax transformations, and one step of an optimizer with an averaging.

A step is the update of a local optimizer, and the move of the parameters by the engine.
:func:`apply_step` changes the parameters in place. An optax transformation returns updates. They
must exist in memory, so it costs a copy of the parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdaso.core.engine import Engine, finish, guard, init_state, move
from jdaso.core.exchange import Exchange
from jdaso.core.moments import read_moments, replace_moments
from jdaso.core.state import AveragingState
from jdaso.core.tree import (
    Fragments,
    add_updates,
    change_unless_skipped,
    helpful_errors,
    is_floating,
    where_tree,
)
from jdaso.core.types import Merge, ParamsWithMoments, PyTree, Schedule, SyncTarget
from jdaso.core.validation import check_choice, check_fragments, check_schedule

#: Parameters after the local optimizer's update, for DASO, DaSGD, Local SGD and DiLoCo.
AFTER_UPDATE = SyncTarget(add_updates, lambda tree, updates: tree)
#: Parameters before the update, at which the gradient was computed, for EASGD.
BEFORE_UPDATE = SyncTarget(lambda params, updates: params, add_updates, schedule_lag=1)
#: Gradients, for synchronous data parallelism.
GRADIENTS = SyncTarget(
    add_updates,
    add_updates,
    of_gradients=True,
    fallback=jnp.zeros_like,  # with their own gradients, the nodes would diverge
    uses_anchor=False,
)


@jax.tree_util.register_static
class Averaging(optax.GradientTransformationExtraArgs):
    """An optax transformation that averages between nodes.

    In an ``optax.chain`` an averaging of parameters must be the last member, and one of gradients
    the first; :func:`jdaso.chain` leaves no choice. What stands behind an averaging of parameters
    changes the merged updates, and nodes drift apart. No error says so, because optax does not tell
    a transformation where it stands, but :func:`jdaso.drift` shows it: after a blocking merge it is
    0 or nearly so only if the averaging is last.

    A copy shares the exchange. ``_replace(update=...)`` gives an optax transformation that is not
    an averaging any more: neither :func:`jdaso.chain` nor :func:`jdaso.apply_gradients` would call
    the new ``update``, so both refuse it.

    Attributes:
        finish: ``(params, state) -> (params, state)``, merges the exchanges in flight.
        state_type: type of the state that ``finish`` takes.
        exchange: how it communicates.
        apply: ``(grads, state, params, **extra_args) -> (params, state)`` of a whole optimizer,
            which changes the parameters in place. None if an optimizer is missing.
        engine: its configuration, for :func:`jdaso.chain`. None if there is nothing to chain.
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
        self._arguments = {
            "init": init,
            "update": update,
            "finish": finish,
            "state_type": state_type,
            "exchange": exchange,
            "apply": apply,
            "engine": engine,
        }
        return self

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # its functions have the exchange and share it with those of a copy

    def __reduce__(self) -> tuple[Any, ...]:
        self.exchange.__getstate__()  # raises first if that cannot be pickled
        return functools.partial(type(self), **self._arguments), ()

    def _replace(self, **functions: Callable) -> Self:
        without = {"apply": None, "engine": None} if "update" in functions else {}
        return type(self)(**self._arguments | functions | without)


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


def averaging(
    name: str,
    exchange: Exchange,
    schedule: Schedule,
    merge: Merge,
    wire: str | None = None,
    blocking_wire: str | None = None,
    nonfinite: str = "skip",
    fragments: Fragments = 1,
    sync_target: SyncTarget = AFTER_UPDATE,
) -> Averaging:
    """Makes an optax transformation of a schedule, an exchange and a merge.

    Args:
        name: name of the algorithm, for error messages.
        exchange: how nodes communicate.
        schedule: when to post and when to merge.
        merge: how the sums change the parameters.
        wire: dtype name on the wire, or None for the dtype of each leaf. With int8 or float4 the
            state holds error feedback: two float32 copies of the parameters, or one of the
            gradients, and with EASGD and DiLoCo.
        blocking_wire: the wire of steps whose plan is ``blocking``.
        nonfinite: what to do if gradients are not finite. ``skip`` skips the step and leaves the
            node out of the next sum. The node then takes the mean of the others. The state counts
            both. ``raise`` raises an error. ``off`` does not read the gradients. Parameters that
            are not finite are found when they are posted. The node is then left out as well,
            unless ``nonfinite`` is ``raise``. A sum that is not finite, because large numbers
            overflow, is ignored by all nodes and counted.
        fragments: number of parts of about equal bytes that the parameters are cut into, or a
            function that returns the index of its part for the path of a leaf. Each part is
            exchanged once in a period, at different steps, so that the load of the network is even.
        sync_target: what is exchanged.

    Returns:
        An :class:`Averaging`, for :func:`jdaso.chain`. It is an optax transformation as well. It
        must then come last in a chain, and its ``update`` requires ``params``, unless
        ``sync_target`` is ``GRADIENTS``.

    Raises:
        ValueError: for another ``nonfinite``, or for more fragments than steps in a period. In
            ``init``, for more fragments than floating-point leaves.
    """
    check_choice("nonfinite", nonfinite, ("skip", "raise", "off"))
    check_schedule(name, schedule)
    if not callable(fragments):
        check_fragments(fragments, schedule)
    if merge.base is not None and not merge.shared:
        raise ValueError(f"{name}: a merge with a base must be shared, because all nodes use it.")
    if not schedule.may_block:
        blocking_wire = wire  # so that the program has no code for the other one
    engine = Engine(
        name, exchange, schedule, merge, wire, blocking_wire, nonfinite, fragments, sync_target
    )
    nothing = optax.with_extra_args_support(optax.identity())

    def update(updates, state, params=None, **extra_args):
        nested = (optax.EmptyState(), state)
        step = apply_step(
            engine, nothing, updates, nested, params, updates_needed=True, **extra_args
        )
        return step.updates, step.averaging

    merge_all = jax.jit(functools.partial(finish, engine))
    init = functools.partial(init_state, engine)
    return Averaging(init, update, merge_all, AveragingState, exchange, engine=engine)


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
    average_moments: bool = False,
    updates_needed: bool = False,
    **extra_args: Any,
) -> Step:
    """Updates the parameters with a local optimizer, and merges and posts what is due.

    If the gradients are not finite, the optimizer's state stays unchanged.

    Args:
        state: of the optimizer and of the averaging.
        average_moments: whether the optimizer's moments are averaged as well.
        updates_needed: whether the result must have updates, which cost memory.
        **extra_args: passed to the optimizer as they are. ``value`` is the loss.
    """
    value = extra_args.get("value")
    _check_gradients(engine.name, grads, params, value)
    old, averaging = state
    target = engine.sync_target
    if target.of_gradients and params is not None:
        _check_floats(engine.name, grads, params)
    finite = guard(engine, grads, averaging)

    def local(tree, params, old):
        """The tree after an update that is computed at ``params``, the state, and the update."""
        updates, new = optimizer.update(grads, old, params, **extra_args)
        return (add_updates(tree, updates) if params is not None else None), new, updates

    def local_if_finite(tree):
        """Tree and state after the update, or both unchanged if the gradients are not finite."""
        if engine.nonfinite == "off":
            return local(tree, params, old)[:2]
        like = jax.eval_shape(local, tree, params, old)[1]
        # An optimizer may widen its state at the first step.
        state = jax.tree.map(lambda x, y: x.astype(y.dtype), old, like)

        def change(tree, state):
            return local(tree, params, state)[:2]

        with helpful_errors("jdaso.chain"):
            return change_unless_skipped(engine.exchange.platform, finite, change, tree, state)

    if target.of_gradients:
        grads, averaging = move(engine, grads, averaging, finite, value, params)
        params, new, updates = local(params, params, old)
        return Step(params, new, averaging, updates)
    if params is None:
        raise ValueError(f"{engine.name} moves parameters: call update(updates, state, params).")
    # Only parameters can be moved in place. Another target, such as the gradients that MDOWNPOUR
    # sends for new parameters, says with its functions how updates are made of what is exchanged.
    updates_needed = updates_needed or target not in (AFTER_UPDATE, BEFORE_UPDATE)
    if target is BEFORE_UPDATE and not updates_needed:
        # The update is added to the merged parameters, so that it needs no memory of its own.
        tree, averaging = move(engine, params, averaging, finite, value)
        params, new = local_if_finite(tree)
        return Step(params, new, averaging, None)
    origin = params if updates_needed else None
    if updates_needed:
        _, new, updates = local(params, params, old)
        tree, new = _where_finite(finite, updates, params), where_tree(finite, new, old)
    else:
        tree, new = local_if_finite(params)
    if average_moments:
        moments = read_moments(optimizer, new, params)
        tree = ParamsWithMoments(tree, moments)
        origin = None if origin is None else ParamsWithMoments(origin, moments)
    tree, averaging = move(engine, tree, averaging, finite, value, origin=origin)
    if average_moments:
        new = replace_moments(optimizer, new, tree.moments)
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
        problem = (
            f"be a tree like params, got a leaf {min(given.keys() - own.keys())!r} that params "
            f"does not have; it has {', '.join(sorted(own)[:4])}, ..."
        )
    elif missing := own.keys() - given.keys():
        problem = (
            f"be a tree like params, got none for the leaf {min(missing)!r}: pass zeros for it"
        )
    else:
        other = [
            f"have the shapes of params, got {shape} at {path!r}, where params has {own[path]}"
            for path, shape in given.items()
            if None not in (shape, own[path]) and shape != own[path]
        ]
        if not other:
            return
        problem = other[0]
    raise ValueError(
        f"{name}: gradients must {problem}. For an optimizer that makes updates of another form "
        "than its gradients, as optax.lookahead and optax.contrib.dpsgd do, use optax.chain("
        "optimizer, averaging), in which the averaging is last."
    )


def _check_floats(name: str, grads: PyTree, params: PyTree) -> None:
    """Raises ValueError for a gradient that is sent where no parameter is, or the other way."""
    own = dict(jax.tree_util.tree_leaves_with_path(params))
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        if path in own and is_floating(own[path]) != is_floating(grad):
            raise ValueError(
                f"{name}: gradients must be floating-point numbers where params are, got "
                f"{jnp.result_type(grad)} at {jax.tree_util.keystr(path)!r}, where params has "
                f"{jnp.result_type(own[path])}: cast the gradient to this dtype."
            )


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...] | None]:
    """The shape of each leaf by its path. A leaf may be None."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is None)
    return {
        jax.tree_util.keystr(path): None if leaf is None else jnp.shape(leaf)
        for path, leaf in leaves
    }


def _where_finite(finite: jax.Array, updates: PyTree, params: PyTree) -> PyTree:
    """The updates, or zeros where there are none or the gradients are not finite."""

    def choose(x, update):
        if x is None:
            return update
        return jnp.zeros_like(x) if update is None else jnp.where(finite, update, 0)

    return jax.tree.map(choose, params, updates, is_leaf=lambda x: x is None)
