"""Exchange k uses the communicator of local index k mod L."""

import jax
import jax.numpy as jnp

import jdaso
from jdaso.exchange.transport import collectives

jdaso.cluster.use_virtual_devices(3)
topology = jdaso.discover_topology()
created = []
original = jdaso.Topology.across_nodes


def across_nodes(self):
    created.append(original(self))
    return created[-1]


jdaso.Topology.across_nodes = across_nodes
exchange = jdaso.mpi_exchange(topology)
communicators = created[: topology.num_local_devices]
assert len(communicators) == 3

used = []
sum_staged = collectives.sum_staged


def record(comm, *rest):
    used.append(comm)
    return sum_staged(comm, *rest)


collectives.sum_staged = record
tx = jdaso.daso(exchange, period=2, delay=1)
params = jnp.ones(4)
state = tx.init(params)
step = jax.jit(tx.update)
for _ in range(15):
    _, state = step(jnp.zeros(4), state, params)
jax.block_until_ready(state)
assert [communicators.index(comm) for comm in used] == [k % 3 for k in range(7)], used
# A consensus does not receive messages of exchanges in flight.
jax.block_until_ready(jdaso.consensus(exchange, params))
assert used[-1] not in communicators
