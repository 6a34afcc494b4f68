"""A local optimizer with an averaging: the chain of both, its step, and its end."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdaso.core.block_format import FORMATS
from jdaso.core.engine import Engine
from jdaso.core.exchange import Exchange
from jdaso.core.moments import (
    check_moments,
    check_reset,
    read_moments,
    replace_moments,
    reset_moments_if,
    warn_of_copies,
)
from jdaso.core.state import AveragingState, averaging_state, find_state, find_states, map_states
from jdaso.core.transformation import Averaging, apply_step
from jdaso.core.tree import is_floating, is_masked
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
    engine = _check_arguments(optimizer, averaging, moments, moments_wire)
    optimizer = optax.with_extra_args_support(optimizer)
    averages = moments == "average"

    def with_moments(params: PyTree, state: PyTree) -> PyTree:
        if not averages:
            return params
        return ParamsWithMoments(params, read_moments(optimizer, state, params))

    def init(params: PyTree) -> ChainState:
        state = optimizer.init(params)
        if moments == "local":
            warn_of_copies(state, params)
        else:
            check_moments(optimizer, state, params if averages else None)
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
            engine, optimizer, grads, state, params, averages, updates_needed, **extra_args
        )
        new = result.optimizer
        if moments == "reset":
            merged, platform = result.averaging.merged, engine.exchange.platform
            new = reset_moments_if(platform, merged, optimizer, new, result.params)
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
        if averages:
            old = replace_moments(optimizer, old, merged.moments)
            return merged.params, ChainState(old, inner)
        if moments == "reset":
            changed = in_flight & inner.merged
            old = reset_moments_if(engine.exchange.platform, changed, optimizer, old, merged)
        return merged, ChainState(old, inner)

    return Averaging(init, update, finish, ChainState, averaging.exchange, apply)


def _check_arguments(
    optimizer: optax.GradientTransformation,
    averaging: Averaging,
    moments: str,
    moments_wire: str | None,
) -> Engine:
    """Raises ValueError for what :func:`chain` does not take. Returns the engine to chain with."""
    if isinstance(moments, optax.GradientTransformation):
        raise ValueError(
            "jdaso.chain takes one optimizer and one averaging, got three transformations: put the "
            "first two into optax.chain, as in jdaso.chain(optax.chain(clip, sgd), averaging)."
        )
    swapped = isinstance(optimizer, Averaging) and not isinstance(averaging, Averaging)
    if swapped or not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            "jdaso.chain takes the optimizer first and the averaging second, as in jdaso.chain("
            f"optax.sgd(0.1), jdaso.daso(exchange, ...)), got a first argument of type "
            f"{type(optimizer).__name__}."
        )
    engine = averaging.engine if isinstance(averaging, Averaging) else None
    if engine is None:
        raise ValueError(
            "averaging must be what jdaso.daso(...) or another algorithm returned, not a chain, an "
            "optimizer, or what _replace(update=...) has made of it, got an object of type "
            f"{type(averaging).__name__}: pass several optimizers as one optax.chain, and use "
            "eamsgd, which contains its optimizer, alone."
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
    if moments != "local" and engine.merge.own_weight is None:
        raise ValueError(
            f"moments must be 'local' with this algorithm, got {moments!r}: the algorithm does not "
            "replace a node's parameters by a mean."
        )
    return engine._replace(moments_wire=moments_wire)


def apply_gradients(
    tx: Averaging, grads: PyTree, opt_state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Updates the parameters with the optimizer, and merges and posts what is due.

    It computes what ``tx.update`` and ``optax.apply_updates`` compute, up to rounding. But the
    averaging changes the parameters in place, in one conditional after the optimizer's update. If
    parameters and state are donated, no parameter is copied at steps without exchange, but for
    EASGD with Adam on a GPU. On CPU devices such steps cost little time. On a GPU the host waits
    for the device once in each step. ``tests/accelerators`` and the tables of
    ``bench/tax.py`` and ``bench/compiled.py`` in ``bench/README.md`` show it.

    Args:
        tx: from :func:`jdaso.chain`, or one with its own averaging, such as :func:`jdaso.eamsgd`.
        grads: a tree like ``params``.
        opt_state: the state that ``tx.init`` or this function returned.
        params: arrays.
        **extra_args: passed to the local optimizer. Schedules observe ``value=loss``.

    Returns:
        The new parameters and the new optimizer state.

    Raises:
        ValueError: for any other optimizer.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.local_sgd(jdaso.single_exchange(), period=4)
    >>> tx = jdaso.chain(optax.sgd(1.0), averaging)
    >>> params = jnp.array([1.0, 2.0])
    >>> params, state = jdaso.apply_gradients(tx, jnp.ones(2), tx.init(params), params)
    >>> params.tolist()
    [0.0, 1.0]
    """
    if not isinstance(tx, Averaging) or tx.apply is None:
        raise ValueError(
            "tx must be what jdaso.chain(optimizer, averaging) returned, or an optimizer that "
            f"contains its averaging, such as jdaso.eamsgd; got an object of type "
            f"{type(tx).__name__}: pass jdaso.chain(optimizer, averaging), or call tx.update and "
            "optax.apply_updates."
        )
    if not isinstance(opt_state, tx.state_type):
        raise ValueError(
            "opt_state must be the state that tx.init or apply_gradients returned, got an object "
            f"of type {type(opt_state).__name__}: call apply_gradients(tx, grads, opt_state, "
            "params), with the state of this tx."
        )
    return tx.apply(grads, opt_state, params, **extra_args)


def drain(transformation: Averaging, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """Waits for the exchanges in flight and merges them, with their actual age.

    Use it at the end of training if the schedule does not know the end, and before the state is
    saved by other means than :class:`jdaso.checkpoint.Checkpoints`, which saves what is in flight.
    It changes nothing if no exchange is in flight. The merge has the algorithm's own weight, so
    nodes still differ after that of :func:`jdaso.dasgd`. :func:`jdaso.consensus` gives the mean.

    Args:
        transformation: what ``jdaso.daso(...)``, another algorithm, or ``jdaso.chain(...)``
            returned. For an ``optax.chain`` that contains it, pass the member, not the chain.
        opt_state: the state of the whole optimizer.
        params: the node's parameters.

    Returns:
        ``(params, opt_state)`` with nothing in flight.

    Raises:
        ValueError: for another transformation, or if ``opt_state`` does not hold exactly one state
            of it.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> averaging = jdaso.daso(jdaso.single_exchange(), period=4, delay=2)
    >>> tx = jdaso.chain(optax.sgd(0.1), averaging)
    >>> params = {"w": jnp.ones(3)}
    >>> params, state = jdaso.drain(tx, tx.init(params), params)
    """
    if not isinstance(transformation, Averaging):
        raise ValueError(
            "drain requires the transformation that jdaso.daso(...), another algorithm or "
            "jdaso.chain(...) returned, not an optax.chain or another wrapper around it: with "
            "averaging = jdaso.daso(...) inside the wrapper, call jdaso.drain(averaging, "
            "opt_state, params), and with tx = jdaso.chain(...) inside it jdaso.drain(tx, "
            f"opt_state, params). Got an object of type {type(transformation).__name__}."
        )
    if transformation.state_type is AveragingState and find_states(ChainState, opt_state):
        raise ValueError(
            "opt_state must belong to the transformation, got the state of a jdaso.chain that "
            "contains it: with tx = jdaso.chain(...), call jdaso.drain(tx, opt_state, params)."
        )
    state = find_state(transformation.state_type, opt_state, params)
    inner = averaging_state(state)
    if not isinstance(inner.step, jax.Array | np.ndarray | np.generic):
        raise ValueError(
            f"opt_state must have arrays, got {type(inner.step).__name__} in place of one: with "
            "flax.nnx, call jdaso.drain(tx, nnx.as_pure(optimizer.opt_state), nnx.as_pure(params))."
        )
    own = _exchanged(transformation.exchange, inner, params)
    moved, state = transformation.finish(own, state)
    params = jax.tree.map(
        lambda new, old: old if is_masked(new) else new, *(moved, params), is_leaf=is_masked
    )
    return params, map_states(transformation.state_type, lambda _: state, opt_state)


def _exchanged(exchange: Exchange, state: AveragingState, params: PyTree) -> PyTree:
    """The parameters, with placeholders for those that the state does not know.

    Inside a wrapper such as ``optax.partition``, an averaging may have only some of them.
    """
    sent = [exchange.sent_leaves(fragment.exchange) for fragment in state.fragments]
    if any(leaves is None for leaves in sent):
        return params
    names = {leaf.name for leaves in sent if leaves for leaf in leaves}

    def choose(path: tuple[Any, ...], x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        # With averaged moments, the names are those of a ParamsWithMoments.
        known = not is_floating(x) or name in names or f".params{name}" in names
        return x if known else optax.MaskedNode()

    return jax.tree_util.tree_map_with_path(choose, params)
