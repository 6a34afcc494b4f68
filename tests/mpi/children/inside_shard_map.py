"""tx.update inside shard_map over a node's devices: one exchange per node, the same numbers."""

import jax
from common import assert_close, daso, first_params, gradients, loss, make_step, run_on_axis
from jax.sharding import PartitionSpec as P

import jdaso

STEPS = 19
jdaso.use_virtual_devices(2)
topology = jdaso.discover_topology()
exchange = jdaso.mpi_exchange(topology)
schedule = jdaso.constant(period=3, delay=2)
tx = daso(exchange, schedule)
step = jax.jit(
    jax.shard_map(make_step(tx), mesh=topology.mesh, in_specs=P(), out_specs=P(), check_vma=False)
)
params = first_params()
state = tx.init(params)
for t in range(STEPS):
    params, state = step(params, state, gradients(params, topology.node, t), loss(topology.node, t))
expected, expected_state = run_on_axis(topology.num_nodes, STEPS, schedule, first_params())
assert_close(params, jax.tree.map(lambda x: x[topology.node], expected))
posted = int(jdaso.averaging_state(state).exchanges)
assert posted == STEPS // 3 == int(jdaso.averaging_state(expected_state).exchanges[0])
# The last one is still in flight.
assert exchange.report()["exchanges"] == posted - 1
params, state = jdaso.drain(jdaso.daso(exchange, schedule), state, params)
assert exchange.report()["exchanges"] == posted
