"""What nodes agree on around training: means and broadcasts of whole trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jdaso._agreement import agreed
from jdaso._base import AGREED, HEADER_SIZE, UNCOUNTED, Exchange, PyTree
from jdaso._leaves import all_finite, divide, float_leaves, is_float
from jdaso._state import AveragingState, all_states


def consensus(exchange: Exchange, tree: PyTree, opt_state: PyTree = None) -> PyTree:
    """The mean of a tree over all nodes, the same bits on every node; blocks.

    For batch statistics before evaluation, for parameters before they are saved. All nodes must
    call it. Inside jit as well as outside. A node of whose numbers one is not finite is left out;
    if all are, the mean is NaN.

    Args:
        exchange: how nodes reach each other.
        tree: arrays, of the same shapes and dtypes on all nodes; floating-point leaves travel in
            their own dtype, are summed in float32 (float64 for float64), and are averaged.
            Leaves of integers and booleans are returned as they are.
        opt_state: the optimizer's state. If it is given, processes also compare their steps, plans
            and schedules, and those that are not equal are an error.

    Returns:
        A tree of the same shapes, dtypes and placement.

    Raises:
        JdasoError: over MPI, on all nodes, if what must be equal is not, naming two ranks: names,
            shapes and dtypes of the leaves; with ``opt_state`` also where training is.

    >>> import jax.numpy as jnp, jdaso
    >>> jdaso.consensus(jdaso.single_exchange(), {"mean": jnp.ones(2)})["mean"].tolist()
    [1.0, 1.0]
    """
    flat, treedef = jax.tree.flatten(tree)
    leaves = [_on_one_device(x) for x in float_leaves(tree)]
    if not leaves:
        return tree
    header = jnp.zeros((HEADER_SIZE,), jnp.float32)
    header = header.at[0].set(all_finite(leaves).astype(jnp.float32))
    number = UNCOUNTED
    step: jax.Array | int = UNCOUNTED
    states = all_states(AveragingState, opt_state)
    if exchange.compares and states:
        plan, schedules = jax.tree.map(
            _on_one_device, (states[0].plan, [(s.step, s.exchanges, s.schedule) for s in states])
        )
        step = _on_one_device(states[0].step)
        header = header.at[-len(AGREED) :].set(agreed(plan, schedules, ()))
    state, _ = exchange.start(exchange.init(tree), number, step, leaves, header, None)
    total, header, _ = exchange.finish(state, number, leaves)
    # Always the mean; but in a program for several devices what the host returned lies on one of
    # them, until it meets a leaf that lies on all.
    members = header[0]
    mean = [
        jnp.where(members >= 0, divide(t, members.astype(t.dtype)).astype(x.dtype), x)
        for t, x in zip(total, leaves, strict=True)
    ]
    means = iter(mean)
    return jax.tree.unflatten(
        treedef, [_placed(next(means), x) if is_float(x) else x for x in flat]
    )


def broadcast(exchange: Exchange, tree: PyTree, root: int = 0) -> PyTree:
    """The tree of one node, bit for bit on every node; blocks.

    For the first parameters, so that all nodes start from the same. All nodes must call it.

    Args:
        exchange: how nodes reach each other.
        tree: arrays of any dtype, of the same shapes and dtypes on all nodes.
        root: index of the node whose tree it is to be.

    Returns:
        A tree of the same shapes, dtypes and placement.

    Raises:
        ValueError: if there is no such node.

    >>> import jax.numpy as jnp, jdaso
    >>> jdaso.broadcast(jdaso.single_exchange(), {"w": jnp.arange(3)})["w"].tolist()
    [0, 1, 2]
    """
    if not 0 <= root < exchange.num_nodes:
        raise ValueError(f"root must be in [0, {exchange.num_nodes}), got {root}.")
    flat, treedef = jax.tree.flatten(tree)
    leaves = [_on_one_device(jnp.asarray(x)) for x in flat]
    exchange.init(tree)  # raises where trees differ
    sent = exchange.broadcast(leaves, root)
    return jax.tree.unflatten(treedef, [_placed(y, x) for y, x in zip(sent, flat, strict=True)])


def _on_one_device(x: jax.Array) -> jax.Array:
    """The whole array on one device: outside jit, the host is called from one device only."""
    if isinstance(x, jax.core.Tracer) or len(x.devices()) == 1:
        return x
    return jax.device_put(x, min(x.devices(), key=lambda device: device.id))


def _placed(value: jax.Array, like) -> jax.Array:
    """Value where like lies, so that a step compiled for the one accepts the other."""
    if isinstance(value, jax.core.Tracer):
        return value
    if isinstance(like, jax.core.Tracer) or not isinstance(like, jax.Array):
        return value
    return jax.device_put(value, like.sharding)
