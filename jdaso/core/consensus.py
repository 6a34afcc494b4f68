"""Blocking means and broadcasts of whole trees between the nodes."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdaso.core.exchange import (
    AGREEMENT_NAMES,
    HEADER_SIZE,
    REPLICATED_NAME,
    UNCOUNTED,
    Exchange,
    agreement_numbers,
)
from jdaso.core.log import logger
from jdaso.core.state import AveragingState, find_states
from jdaso.core.tree import (
    check_arrays,
    division_by,
    float_leaves,
    helpful_errors,
    named_floats,
    place_like,
    split,
    widened,
)
from jdaso.core.types import Leaves, PyTree
from jdaso.core.wire import round_to

_caller: ContextVar[str] = ContextVar("_caller", default="")


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Decorates a function whose name :func:`caller` returns while it runs."""
    token = _caller.set(caller() or name)
    try:
        yield
    finally:
        _caller.reset(token)


def caller() -> str:
    """The name of the outermost of the functions below that runs, for messages; otherwise ""."""
    return _caller.get()


@_named("jdaso.consensus")
def consensus(exchange: Exchange, tree: PyTree, opt_state: PyTree = None) -> PyTree:
    """Computes the mean of a tree over all nodes, with the same bits on every node.

    The bits are the same if the processors of all nodes round alike. Use it for batch statistics
    before evaluation, and for parameters before they are saved. All nodes must call it, inside or
    outside jit. The result is ready when all have. Over MPI, a compiled program may call it once
    for an exchange: put all arrays into one tree. Inside jit, leaves that ``tx.init`` has not seen
    count as replicated.

    The mean of each leaf is over the nodes on which all numbers of this leaf are finite. A leaf
    that is finite on no node becomes NaN, and the means of the other leaves do not change. Keep
    such a leaf, for instance a mask of ``-inf``, out of the tree.

    Args:
        exchange: how nodes communicate.
        tree: arrays of the same shapes and dtypes on all nodes. Floating-point leaves are sent in
            their own dtype and summed in float32 (float64 for float64). Leaves of integers and
            booleans are returned unchanged.
        opt_state: the optimizer's state. If it is given, processes also compare their steps, plans
            and schedules.

    Returns:
        A tree of the same shapes, dtypes and placement.

    Raises:
        ValueError: for a second call in a compiled program, or for a NumPy array of float64, unless
            ``jax_enable_x64`` is set. Inside ``shard_map``, for a leaf that is not among those of
            ``shardings``.
        JdasoError: over MPI, on all nodes, if names, shapes or dtypes of the leaves differ, or the
            steps, plans and schedules in ``opt_state``. The message names two ranks.

    >>> import jax.numpy as jnp, jdaso
    >>> jdaso.consensus(jdaso.single_exchange(), {"mean": jnp.ones(2)})["mean"].tolist()
    [1.0, 1.0]
    """
    _check_arguments("consensus", exchange, tree)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _is_cut(leaf) and leaf.dtype.kind == "f":
            _refuse_cut(path, leaf, "Pass x.astype(numpy.float32), or set jax_enable_x64.")
    floats, replace = split(tree)
    if not floats:
        return tree
    leaves = [jnp.asarray(x) for x in floats]
    if not exchange.may_shard:
        leaves = [
            jax.device_put(x, min(x.devices(), key=lambda d: d.id)) if _is_spread(x) else x
            for x in leaves
        ]
    names = [name for name, _ in named_floats(tree)]
    with helpful_errors(caller()):
        finite = exchange.finite_leaves(leaves)
    if not isinstance(finite, jax.core.Tracer):
        for name in itertools.compress(names, ~np.asarray(finite)):
            _warn_not_finite(caller(), name or "the array")
    if isinstance(finite, jax.core.Tracer) or not finite.all():  # otherwise without a copy
        leaves = _masked(leaves, finite)
    # The number of nodes on which each leaf is finite travels as one more leaf.
    leaves = [*leaves, finite.astype(jnp.float32)]
    bound = exchange.bind([*names, REPLICATED_NAME], leaves)
    header = jnp.zeros((HEADER_SIZE,), jnp.float32).at[0].set(1)
    step: jax.Array | int = UNCOUNTED
    states = find_states(AveragingState, opt_state)
    if exchange.compares and states:
        step, plan = states[0].step, states[0].plan
        schedules = [(s.step, s.exchanges, s.schedule) for s in states]
        header = header.at[-len(AGREEMENT_NAMES) :].set(agreement_numbers(plan, schedules, ()))
    with helpful_errors(caller()):
        state = exchange.init(tree, sharded=False)
        state, _ = bound.post(state, UNCOUNTED, step, leaves, header, None)
        [*total, members], _, _ = bound.collect(state, UNCOUNTED, leaves)
    means = _means(total, members, leaves[:-1])
    return replace([place_like(mean, x) for mean, x in zip(means, floats, strict=True)])


@_named("jdaso.broadcast")
def broadcast(exchange: Exchange, tree: PyTree, root: int = 0) -> PyTree:
    """Sends the tree of one node to all nodes, bit for bit.

    Use it for the initial parameters, so that all nodes start with the same. All nodes must call
    it. The result is ready when all have.

    Args:
        exchange: how nodes communicate.
        tree: arrays of any dtype, also keys, with the same shapes and dtypes on all nodes. NumPy
            arrays become JAX arrays, unless JAX would cut them, as it cuts 64 bits to 32; these
            stay NumPy arrays.
        root: index of the node whose tree is sent.

    Returns:
        A tree of the same shapes, dtypes and placement.

    Raises:
        ValueError: for a root that is not the index of a node, a leaf that is no array, or inside
            jit a NumPy array that JAX would cut.

    >>> import jax.numpy as jnp, jdaso
    >>> jdaso.broadcast(jdaso.single_exchange(), {"w": jnp.arange(3)})["w"].tolist()
    [0, 1, 2]
    """
    _check_arguments("broadcast", exchange, tree)
    if not 0 <= root < exchange.num_nodes:
        raise ValueError(
            f"root must be the index of a node, in [0, {exchange.num_nodes}), got {root}."
        )
    given, treedef = jax.tree.flatten(tree)
    flat = [_as_plain(x) for x in given]
    # On the host, because arrays of several devices may not fit on one.
    leaves: list[Any] = [np.asarray(x) if _is_spread(x) else x for x in flat]
    plain = jax.tree.unflatten(treedef, flat)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(plain)]
    exchange.init(plain, sharded=False)  # raises if trees differ
    sent = exchange.broadcast([jax.tree_util.keystr(path) for path in paths], leaves, root)
    sent = [place_like(y, x) for y, x in zip(sent, flat, strict=True)]
    return jax.tree.unflatten(treedef, map(_like_given, paths, sent, given))


@_named("jdaso.drift")
def drift(exchange: Exchange, params: PyTree) -> jax.Array:
    """Computes the distance of this node's parameters from the mean of all nodes.

    The distance is ``||x_node - mean_i x_i||``, the Euclidean norm over all floating-point leaves
    together. All nodes must call it, inside or outside jit. The result is ready when all have.
    Inside ``shard_map`` it is the distance of the device's shards.

    Args:
        exchange: how nodes communicate.
        params: arrays of the same shapes and dtypes on all nodes. 16-bit leaves are sent as
            float32, because a mean rounded to 16 bits would differ even from equal parameters.

    Returns:
        A float32 scalar, different on every node.

    >>> import jax.numpy as jnp, jdaso
    >>> float(jdaso.drift(jdaso.single_exchange(), {"w": jnp.ones(3)}))
    0.0
    """
    _check_arguments("drift", exchange, params)
    own = widened(params)
    return _distance(float_leaves(own), float_leaves(consensus(exchange, own)))


def _check_arguments(name: str, exchange: Exchange, tree: PyTree) -> None:
    if not isinstance(exchange, Exchange):
        raise ValueError(
            f"{name} requires the exchange first, as in jdaso.{name}(exchange, tree), got a "
            f"{type(exchange).__name__}."
        )
    check_arrays(name, tree)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_cut(leaf: Any) -> bool:
    """Whether a leaf is a NumPy array that JAX cannot hold, or would cut to 32 bits."""
    if not isinstance(leaf, np.ndarray | np.generic):
        return False
    try:
        return jnp.asarray(np.zeros((), leaf.dtype)).dtype != leaf.dtype
    except TypeError:
        return True


def _as_plain(leaf: Any) -> jax.Array:
    """A leaf as a JAX array: the data of keys, and the bytes of what JAX would cut."""
    if _is_cut(leaf):
        return jnp.asarray(np.array(leaf)[..., None].view(np.uint8))
    return jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf)


def _like_given(path: Any, plain: jax.Array, leaf: Any) -> Any:
    """The inverse of :func:`_as_plain`, like a leaf."""
    if _is_cut(leaf):
        if isinstance(plain, jax.core.Tracer):
            _refuse_cut(path, leaf, "Call broadcast outside of jit, or set jax_enable_x64.")
        return np.array(plain).view(leaf.dtype).reshape(leaf.shape)
    if _is_key(leaf):
        return jax.random.wrap_key_data(plain, impl=jax.random.key_impl(leaf))
    return plain


def _refuse_cut(path: Any, leaf: Any, advice: str) -> NoReturn:
    raise ValueError(
        f"{caller()}: {jax.tree_util.keystr(path) or 'the tree'} is a NumPy array of dtype "
        f"{leaf.dtype}, which JAX cannot hold or cuts to 32 bits. {advice}"
    )


def _is_spread(x: jax.Array) -> bool:
    """Whether an array is on several devices, all of this process."""
    return not isinstance(x, jax.core.Tracer) and len(x.devices()) > 1 and x.is_fully_addressable


# Outside jit, JAX would compile each operation for each shape: 9 s for a hundred shapes.
@jax.jit
def _masked(leaves: Leaves, finite: jax.Array) -> Leaves:
    return [jnp.where(finite[i], x, jnp.zeros_like(x)) for i, x in enumerate(leaves)]


@functools.cache  # once for each name
def _warn_not_finite(call: str, name: str) -> None:
    logger.warning(
        "%s: %s is not finite on this node, so its mean is that of the other nodes, and NaN if "
        "there is none. If it is not finite by design, keep it out of the tree.",
        *(call, name),
    )


@jax.jit
def _means(total: Leaves, members: jax.Array, like: Leaves) -> Leaves:
    return [
        round_to(division_by(members[i])(t), x.dtype)
        for i, (t, x) in enumerate(zip(total, like, strict=True))
    ]


@jax.jit
def _distance(a: PyTree, b: PyTree) -> jax.Array:
    return jnp.asarray(optax.tree.norm(optax.tree.sub(a, b)), jnp.float32)
