"""tx.update inside shard_map over a node's devices: one exchange per node, the same numbers."""

import jax
from common import (
    assert_close,
    computed_once,
    daso,
    first_params,
    gradients,
    loss,
    make_step,
    run_on_axis,
)
from jax.sharding import PartitionSpec as P

import jdaso

jdaso.cluster.use_virtual_devices(2)
topology = jdaso.discover_topology()


def run(exchange, schedule, steps):
    """Trains inside shard_map, compares with a virtual cluster, and returns the state."""
    tx = daso(exchange, schedule)
    step = jax.jit(
        jax.shard_map(
            make_step(tx), mesh=topology.mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
    )
    params = first_params()
    state = tx.init(params)
    for t in range(steps):
        grads = gradients(params, topology.node, t)
        params, state = step(params, state, grads, loss(topology.node, t))
    expected, _ = computed_once(
        topology,
        lambda: run_on_axis(
            topology.num_nodes, steps, lambda exchange: daso(exchange, schedule), first_params()
        ),
    )
    assert_close(params, jax.tree.map(lambda x: x[topology.node], expected))
    return params, state


exchange = jdaso.mpi_exchange(topology)
schedule = jdaso.constant(period=3, delay=2)
params, state = run(exchange, schedule, steps=19)
posted = int(jdaso.core.averaging_state(state).exchanges)
assert posted == 19 // 3
# The last one is still in flight.
assert exchange.report()["exchanges"] == posted - 1
drained = jdaso.drain(jdaso.daso(exchange, schedule=schedule), state, params)
params, state = jax.block_until_ready(drained)  # or the report may be read before it has landed
assert exchange.report()["exchanges"] == posted

# Blocking phases: a device may come to collect before the other one has posted.
phases = jdaso.cycling(period=4, delay=2, warmup=5, cooldown=5, total=24, epoch=6)
run(jdaso.mpi_exchange(topology), phases, steps=24)
