"""The k-th exchange is carried by the communicator of local index k mod L."""

import jax
import jax.numpy as jnp

import jdaso
from jdaso.exchange import _operations

jdaso.use_virtual_devices(3)
topology = jdaso.discover_topology()
handed_out = []
original = jdaso.Topology.group_communicators


def group_communicators(self):
    handed_out.append(original(self))
    return handed_out[-1]


jdaso.Topology.group_communicators = group_communicators
exchange = jdaso.mpi_exchange(topology)
channels = handed_out[0]
assert len(channels) == topology.num_local_devices == 3

used = []
carry = _operations.sum_staged


def record(comm, *rest):
    used.append(comm)
    return carry(comm, *rest)


_operations.sum_staged = record
tx = jdaso.daso(exchange, jdaso.constant(period=2, delay=1))
params = jnp.ones(4)
state = tx.init(params)
step = jax.jit(tx.update)
for _ in range(15):
    _, state = step(jnp.zeros(4), state, params)
jax.block_until_ready(state)
assert [channels.index(comm) for comm in used] == [k % 3 for k in range(7)], used
# What happens around training does not meet what is in flight.
jdaso.consensus(exchange, params)
assert used[-1] not in channels
