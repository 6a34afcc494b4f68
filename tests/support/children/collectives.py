"""Consensus and broadcast of trees that lie on all devices of a node, in and outside jit."""

import compile_in_turn  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jdaso

jdaso.cluster.use_virtual_devices(2)
topology = jdaso.discover_topology()
exchange = jdaso.mpi_exchange(topology)
nodes, node = topology.num_nodes, topology.node
replicated = NamedSharding(topology.mesh, PartitionSpec())
split = NamedSharding(topology.mesh, PartitionSpec("local"))


def tree(node):
    """Different on every node, in every dtype that a model's state may have."""
    rng = np.random.default_rng(node)
    return {
        "float32": rng.normal(size=(3, 4)).astype(np.float32),
        "bfloat16": rng.normal(size=5).astype(jnp.bfloat16),
        "int32": rng.integers(0, 100, size=6).astype(np.int32),
        "bool": rng.random(7) < 0.5,
        "scalar": np.float32(node),
    }


def on_every_device(x):
    copies = [np.asarray(shard.data) for shard in x.addressable_shards]
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])
    return copies[0]


own = jax.device_put(tree(node), replicated)
for function in (jdaso.broadcast, jax.jit(jdaso.broadcast, static_argnums=(0, 2))):
    for root in range(nodes):
        sent = function(exchange, own, root)
        for name, x in tree(root).items():
            np.testing.assert_array_equal(on_every_device(sent[name]), x)
            assert sent[name].dtype == x.dtype
            assert sent[name].sharding.is_equivalent_to(replicated, x.ndim), name

for function in (jdaso.consensus, jax.jit(jdaso.consensus, static_argnums=0)):
    mean = function(exchange, own)
    for name, x in tree(node).items():
        if name in ("int32", "bool"):
            np.testing.assert_array_equal(on_every_device(mean[name]), x)
            continue
        expected = sum(np.asarray(tree(i)[name], np.float64) for i in range(nodes)) / nodes
        # The sum is rounded to the leaf's dtype on its way back, the mean once more.
        error = 2 * float(jnp.finfo(x.dtype).eps)
        np.testing.assert_allclose(
            on_every_device(mean[name]).astype(np.float64), expected, rtol=error, atol=error
        )
        assert mean[name].sharding.is_equivalent_to(replicated, x.ndim), name
        everywhere = topology.comm.allgather(on_every_device(mean[name]).tobytes())
        assert len(set(everywhere)) == 1, name

# Leaves that are split over the devices keep their place, too.
rows = jax.device_put(jnp.arange(8.0).reshape(4, 2) + node, split)
mean = jdaso.consensus(exchange, rows)
np.testing.assert_array_equal(mean, np.arange(8.0).reshape(4, 2) + (nodes - 1) / 2)
assert mean.sharding == split
