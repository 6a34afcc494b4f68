"""On a mesh whose axis is the nodes, DASO gives what it gives on a virtual cluster."""

import functools

import jax
import jax.numpy as jnp
import pytest
from common import assert_close, daso, first_params, gradients, loss, make_step, run_on_axis
from jax.sharding import PartitionSpec as P

import jdaso

NODES, STEPS = 4, 30
jdaso.use_virtual_devices(NODES)
mesh = jax.make_mesh((NODES,), ("node",), axis_types=(jax.sharding.AxisType.Auto,))
schedule = jdaso.cycling(period=4, delay=3, warmup=3, cooldown=3, total=STEPS, epoch=6, patience=0)
tx = daso(jdaso.axis_exchange("node", NODES), schedule)
first = first_params()


def one_node(function, check_vma=False):
    """Runs a function of one node's values on every device of the mesh."""

    def call(*stacked):
        own = jax.tree.map(lambda x: x[0], stacked)
        return jax.tree.map(lambda x: x[None], function(*own))

    return jax.shard_map(
        call, mesh=mesh, in_specs=P("node"), out_specs=P("node"), check_vma=check_vma
    )


params = jax.tree.map(lambda x: jnp.stack([x] * NODES), first)
state = jax.jit(one_node(tx.init))(params)
step = functools.partial(jax.jit, donate_argnums=(0, 1))(one_node(make_step(tx)))
for t in range(STEPS):
    grads = [gradients(first, node, t) for node in range(NODES)]
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    losses = jnp.stack([loss(node, t) for node in range(NODES)])
    params, state = step(params, state, grads, losses)

expected, _ = run_on_axis(NODES, STEPS, schedule, first)
assert_close(params, expected)

with pytest.raises(ValueError, match="check_vma=False"):
    one_node(make_step(tx), check_vma=True)(params, state, grads, losses)
