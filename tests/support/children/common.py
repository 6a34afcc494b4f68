"""What the child programs share: a small model, gradients that depend on node and step."""

from __future__ import annotations

import compile_in_turn  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdaso
from jdaso.core.exchange import HostState


def first_params(dtypes=("float32",)):
    """Leaves of several shapes, none a multiple of the number of nodes, for each dtype."""
    shapes = {"kernel": (3, 5), "bias": (7,), "scale": ()}
    rng = np.random.default_rng(0)
    return {
        dtype: {name: jnp.asarray(rng.normal(size=s), dtype) for name, s in shapes.items()}
        for dtype in dtypes
    }


BAD = None  # node and step at which gradients are not finite; momentum then stays so


def gradients(params, node, step):
    """Random gradients, a function of node and step."""
    rng = np.random.default_rng((node, step))
    scale = np.nan if (node, step) == BAD else 1.0
    return jax.tree.map(lambda p: jnp.asarray(scale * rng.normal(size=p.shape), p.dtype), params)


def loss(node, step):
    """A loss that falls for a while and then stays: plateaus occur."""
    return jnp.float32(max(1.0, 5.0 - 0.2 * step) + 0.01 * node)


SGD, BF16 = optax.sgd(0.1, momentum=0.9), "bfloat16"


def daso(exchange, schedule, **options):
    """DASO as a whole optimizer."""
    return optax.chain(SGD, jdaso.daso(exchange, schedule=schedule, **options))


# name -> exchange -> a whole optimizer; it needs no more than the three leaves of first_params.
ALGORITHMS = {
    "daso delta int8": lambda x: jdaso.chain(
        SGD, jdaso.daso(x, 4, 3, wire="int8", blocking_wire="float32", merge="delta")
    ),
    "dasgd": lambda x: jdaso.chain(SGD, jdaso.dasgd(x, 4, 3)),
    "dasgd int8": lambda x: jdaso.chain(SGD, jdaso.dasgd(x, 4, 3, wire="int8")),
    "dasgd fragments": lambda x: jdaso.chain(SGD, jdaso.dasgd(x, 4, 4, fragments=3)),
    "local_sgd delta": lambda x: jdaso.chain(SGD, jdaso.local_sgd(x, 4, 3, "delta", wire=BF16)),
    "local_sgd": lambda x: jdaso.chain(SGD, jdaso.local_sgd(x, 4)),
    "easgd": lambda x: jdaso.chain(SGD, jdaso.easgd(x, 4)),
    "eamsgd": lambda x: jdaso.eamsgd(x, 4, learning_rate=0.1, momentum=0.9),
    "diloco": lambda x: jdaso.chain(
        SGD, jdaso.diloco(x, 5, delay=3, mix=0.5, fragments=2, warmup=1)
    ),
    "allreduce_gradients": lambda x: jdaso.chain(SGD, jdaso.allreduce_gradients(x, "float32")),
    "moments average": lambda x: jdaso.chain(SGD, jdaso.dasgd(x, 4, 3), moments="average"),
    "moments int8": lambda x: jdaso.chain(
        SGD, jdaso.dasgd(x, 4, 3, wire="int8"), "average", moments_wire=BF16
    ),
}


def make_step(tx, in_place=False):
    """An unjitted optimizer step, by ``tx.update`` or by ``jdaso.apply_gradients``."""

    def step(params, state, grads, value):
        if in_place:
            return jdaso.apply_gradients(tx, grads, state, params, value=value)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def run_on_axis(num_nodes, steps, build, params):
    """The same run as a virtual cluster; leaves have a leading axis of nodes."""
    tx = build(jdaso.axis_exchange("node", num_nodes))
    params = jax.tree.map(lambda x: jnp.stack([x] * num_nodes), params)
    state = jax.jit(jax.vmap(tx.init))(params)
    step = jax.jit(jax.vmap(make_step(tx), axis_name="node"))
    for t in range(steps):
        grads = [
            gradients(jax.tree.map(lambda x: x[0], params), node, t) for node in range(num_nodes)
        ]
        grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
        losses = jnp.stack([loss(node, t) for node in range(num_nodes)])
        params, state = step(params, state, grads, losses)
    return params, state


def computed_once(topology, function):
    """What a function returns, as NumPy arrays, computed by one process for all."""
    result = None
    if topology.rank == 0:
        result = jax.tree.map(np.asarray, function())
    topology.group.barrier("a result of rank 0")  # bcast would keep a core busy
    return topology.comm.bcast(result)


def saved_leaves(tree):
    """The leaves of a tree, without the keys of its exchanges, which differ between exchanges."""

    def is_host_state(node):
        return isinstance(node, HostState)

    leaves = jax.tree.leaves(tree, is_leaf=is_host_state)
    return [x for x in leaves if not is_host_state(x)]


def assert_close(actual, expected, rtol=1e-6):
    """Relative to the largest number of the tree.

    Sums may differ in the order of their terms, and versions of XLA fuse different multiplications
    and additions. A leaf that is near zero has the rounding errors of the larger terms it is the
    sum of.
    """
    xs, ys = ([np.asarray(x, np.float64) for x in jax.tree.leaves(t)] for t in (actual, expected))
    atol = rtol * max((np.abs(y).max() for y in ys), default=0)
    for x, y in zip(xs, ys, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=atol)
