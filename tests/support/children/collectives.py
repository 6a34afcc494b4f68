"""Consensus and broadcast of trees that lie on all devices of a node, in and outside jit."""

import functools

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

# Nothing orders a consensus and a post of one program, so nodes may start them in either order.
daso = jdaso.daso(exchange, 1, 1)
params, step = {"w": jnp.full(3, float(node))}, jax.jit(daso.update)
state = daso.init(params)
zeros = jax.tree.map(jnp.zeros_like, params)
for _ in range(2):
    before = jdaso.consensus(exchange, params) if node == 0 else None
    updates, state = step(zeros, state, params)
    after = jdaso.consensus(exchange, params) if node else before
    np.testing.assert_array_equal(after["w"], (nodes - 1) / 2)
params, state = jdaso.drain(daso, state, params)

# Leaves that are split over the devices keep their place, too.
rows = jax.device_put(jnp.arange(8.0).reshape(4, 2) + node, split)
mean = jdaso.consensus(exchange, rows)
np.testing.assert_array_equal(mean, np.arange(8.0).reshape(4, 2) + (nodes - 1) / 2)
assert mean.sharding == split

# NumPy arrays that JAX would cut to 32 bits stay on the host, and every dtype is sent.
big = {"n": np.array([5_000_000_000 + node]), "x": np.float64(1 / 3 + node)}
sent = jdaso.broadcast(exchange, big, 1)
assert (sent["n"].tolist(), sent["x"]) == ([5_000_000_001], 1 / 3 + 1)
assert (sent["n"].dtype, sent["x"].dtype) == (np.int64, np.float64)
for dtype in ("complex64", "float8_e8m0fnu", "float4_e2m1fn", "int4"):
    bits = jax.device_put(jnp.array([1 + node, 2]).astype(dtype), replicated)
    for function in (jdaso.broadcast, jax.jit(jdaso.broadcast, static_argnums=(0, 2))):
        sent = function(exchange, bits, 1)
        assert sent.dtype == dtype
        np.testing.assert_array_equal(sent, jnp.array([2, 2]).astype(dtype))

# A node is left out of the mean of a leaf that is not finite, on any of its devices.
by_leaf = {"a": rows, "b": rows.at[3, 0].set(jnp.nan if node == 0 else 7), "c": rows * jnp.inf}


@jax.jit
def inside(tree):
    specs = PartitionSpec("local")
    consensus = functools.partial(jdaso.consensus, split_exchange)
    return jax.shard_map(
        consensus, mesh=topology.mesh, in_specs=specs, out_specs=specs, check_vma=False
    )(tree)


split_exchange = jdaso.mpi_exchange(topology, shardings=PartitionSpec("local"))
jdaso.local_sgd(split_exchange, 1).init(dict.fromkeys("abc", rows))
compiled = jax.jit(jdaso.consensus, static_argnums=0)
for mean in (jdaso.consensus(exchange, by_leaf), compiled(exchange, by_leaf), inside(by_leaf)):
    expected = np.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(mean["a"], expected + (nodes - 1) / 2)
    others = expected + nodes / 2
    others[3, 0] = 7
    np.testing.assert_array_equal(mean["b"], others)
    assert np.isnan(mean["c"]).all()
