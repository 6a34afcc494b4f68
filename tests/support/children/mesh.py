"""On a mesh whose axis is the nodes, algorithms give what they give on a virtual cluster."""

import functools

import jax
import jax.numpy as jnp
import pytest
from common import (
    ALGORITHMS,
    assert_close,
    daso,
    first_params,
    gradients,
    loss,
    make_step,
    run_on_axis,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso

NODES, STEPS = 3, 30
jdaso.cluster.use_virtual_devices(NODES)
mesh = jax.make_mesh((NODES,), ("node",), axis_types=(jax.sharding.AxisType.Auto,))
first = first_params()


def one_node(function, check_vma=False):
    """Runs a function of one node's values on every device of the mesh."""

    def call(*stacked):
        own = jax.tree.map(lambda x: x[0], stacked)
        return jax.tree.map(lambda x: x[None], function(*own))

    return jax.shard_map(
        call, mesh=mesh, in_specs=P("node"), out_specs=P("node"), check_vma=check_vma
    )


def inputs(t):
    grads = [gradients(first, node, t) for node in range(NODES)]
    losses = jnp.stack([loss(node, t) for node in range(NODES)])
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads), losses


def phases(exchange):
    schedule = jdaso.cycling(
        period=4, delay=3, warmup=3, cooldown=3, total=STEPS, epoch=6, patience=0
    )
    return daso(exchange, schedule)


for build, steps in {phases: STEPS, **dict.fromkeys(ALGORITHMS.values(), 12)}.items():
    tx = build(jdaso.axis_exchange("node", NODES))
    params = jax.tree.map(lambda x: jnp.stack([x] * NODES), first)
    # As the results of a step are placed, or the second step would be another program.
    params = jax.device_put(params, NamedSharding(mesh, P("node")))
    state = jax.jit(one_node(tx.init))(params)
    step = functools.partial(jax.jit, donate_argnums=(0, 1))(one_node(make_step(tx)))
    for t in range(steps):
        params, state = step(params, state, *inputs(t))
    expected, expected_state = run_on_axis(NODES, steps, build, first)
    assert_close(params, expected)
    exchanges = [jdaso.core.averaging_state(s).exchanges.tolist() for s in (state, expected_state)]
    assert exchanges[0] == exchanges[1] > [0] * NODES

tx = phases(jdaso.axis_exchange("node", NODES))
with pytest.raises(ValueError, match="check_vma=False"):
    one_node(make_step(tx), check_vma=True)(params, jax.jit(one_node(tx.init))(params), *inputs(0))
