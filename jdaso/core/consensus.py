"""Blocking means and broadcasts of whole trees between the nodes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdaso.core.caller import caller, named
from jdaso.core.consistency import agreement_numbers
from jdaso.core.exchange import AGREEMENT_NAMES, HEADER_SIZE, UNCOUNTED, Exchange
from jdaso.core.state import AveragingState, find_states
from jdaso.core.tree import (
    all_finite,
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


@named
def consensus(exchange: Exchange, tree: PyTree, opt_state: PyTree = None) -> PyTree:
    """Computes the mean of a tree over all nodes, with the same bits on every node.

    The bits are the same if the processors of all nodes round alike. Use it for batch statistics
    before evaluation, and for parameters before they are saved. All nodes must call it, inside or
    outside jit. The result is ready when all have. A node with a number that is not finite is left
    out. If all nodes are left out, the mean is NaN. Over MPI, a compiled program may call it once
    for an exchange: put all arrays into one tree. Inside jit, leaves that ``tx.init`` has not seen
    count as replicated.

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
        ValueError: for a second call in a compiled program. Inside ``shard_map``, for a leaf that
            is not among those of ``shardings``.
        JdasoError: over MPI, on all nodes, if names, shapes or dtypes of the leaves differ, or the
            steps, plans and schedules in ``opt_state``. The message names two ranks.

    >>> import jax.numpy as jnp, jdaso
    >>> jdaso.consensus(jdaso.single_exchange(), {"mean": jnp.ones(2)})["mean"].tolist()
    [1.0, 1.0]
    """
    _check_arguments("consensus", exchange, tree)
    floats, replace = split(tree)
    if not floats:
        return tree
    leaves = [jnp.asarray(x) for x in floats]
    if exchange.bind is None:
        leaves = [_on_one_device(x) for x in leaves]
    exchange = exchange.bound([name for name, _ in named_floats(tree)], leaves)
    header = jnp.zeros((HEADER_SIZE,), jnp.float32)
    header = header.at[0].set(_all_finite(leaves).astype(jnp.float32))
    step: jax.Array | int = UNCOUNTED
    states = find_states(AveragingState, opt_state)
    if exchange.compares and states:
        step, plan = states[0].step, states[0].plan
        schedules = [(s.step, s.exchanges, s.schedule) for s in states]
        header = header.at[-len(AGREEMENT_NAMES) :].set(agreement_numbers(plan, schedules, ()))
    with helpful_errors(caller() or "jdaso.consensus"):
        state, _ = exchange.start(exchange.init(tree), UNCOUNTED, step, leaves, header, None)
        total, header, _ = exchange.finish(state, UNCOUNTED, leaves)
    means = _means(total, header[0], leaves)
    return replace([place_like(mean, x) for mean, x in zip(means, floats, strict=True)])


@named
def broadcast(exchange: Exchange, tree: PyTree, root: int = 0) -> PyTree:
    """Sends the tree of one node to all nodes, bit for bit.

    Use it for the initial parameters, so that all nodes start with the same. All nodes must call
    it. The result is ready when all have.

    Args:
        exchange: how nodes communicate.
        tree: arrays of any dtype, also keys, with the same shapes and dtypes on all nodes.
        root: index of the node whose tree is sent.

    Returns:
        A tree of the same shapes, dtypes and placement.

    Raises:
        ValueError: for a root that is not the index of a node, or a leaf that is no array.

    >>> import jax.numpy as jnp, jdaso
    >>> jdaso.broadcast(jdaso.single_exchange(), {"w": jnp.arange(3)})["w"].tolist()
    [0, 1, 2]
    """
    _check_arguments("broadcast", exchange, tree)
    if not 0 <= root < exchange.num_nodes:
        raise ValueError(
            f"root must be the index of a node, in [0, {exchange.num_nodes}), got {root}."
        )
    keys, treedef = jax.tree.flatten(tree)
    flat = [jax.random.key_data(x) if _is_key(x) else jnp.asarray(x) for x in keys]
    leaves = [_on_host(x) for x in flat]
    unwrapped = jax.tree.unflatten(treedef, flat)
    paths = jax.tree_util.tree_leaves_with_path(unwrapped)
    exchange = exchange.bound([jax.tree_util.keystr(path) for path, _ in paths], leaves)
    exchange.init(unwrapped)  # raises if trees differ
    sent = exchange.broadcast(leaves, root)
    sent = [place_like(y, x) for y, x in zip(sent, flat, strict=True)]
    return jax.tree.unflatten(
        treedef,
        [
            jax.random.wrap_key_data(y, impl=jax.random.key_impl(x)) if _is_key(x) else y
            for y, x in zip(sent, keys, strict=True)
        ],
    )


@named
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


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _on_one_device(x: jax.Array) -> jax.Array:
    """Moves an array to one device."""
    if isinstance(x, jax.core.Tracer) or len(x.devices()) == 1:
        return x
    return jax.device_put(x, min(x.devices(), key=lambda device: device.id))


def _on_host(x: jax.Array) -> Any:
    """Copies an array of several devices to the host, because it may not fit on one device.

    Arrays on devices of several processes stay where they are.
    """
    if isinstance(x, jax.core.Tracer) or len(x.devices()) == 1 or not x.is_fully_addressable:
        return x
    return np.asarray(x)


# Outside jit, JAX would compile each operation for each shape: 9 s for a hundred shapes.
_all_finite = jax.jit(all_finite)


@jax.jit
def _means(total: Leaves, members: jax.Array, like: Leaves) -> Leaves:
    divide = division_by(members)
    return [round_to(divide(t), x.dtype) for t, x in zip(total, like, strict=True)]


@jax.jit
def _distance(a: PyTree, b: PyTree) -> jax.Array:
    return jnp.asarray(optax.tree.norm(optax.tree.sub(a, b)), jnp.float32)
