"""period 1, delay 0, SGD: the training step equals one on the joint batch of all devices."""

import argparse

import compile_in_turn  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jdaso

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--joined", action="store_true", help="two processes of one device a node")
arguments = parser.parse_args()

STEPS, ROWS = 10, 4  # rows of the batch per device
jdaso.cluster.use_virtual_devices(arguments.devices)
joined = arguments.joined
topology = jdaso.discover_topology(2 if joined else 1, join_processes=joined)
exchange = jdaso.mpi_exchange(topology)
devices = topology.num_nodes * topology.num_local_devices


def loss_fn(params, x, y, axis=None):
    """A layer with a batch norm over the node's devices, whose mean is part of the gradient."""
    hidden = x @ params["first"]
    mean = jnp.mean(hidden, axis=0)
    mean = mean if axis is None else jax.lax.pmean(mean, axis)
    return jnp.mean((jnp.tanh(hidden - mean) @ params["second"] - y) ** 2)


def first_params():
    rng = np.random.default_rng(1)
    shapes = {"first": (3, 5), "second": (5,)}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def batch(step, device):
    rng = np.random.default_rng((step, device))
    return rng.normal(size=(ROWS, 3)).astype("f4"), rng.normal(size=ROWS).astype("f4")


def joint(step, first, last):
    parts = [batch(step, device) for device in range(first, last)]
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


value_and_grad = jdaso.local_value_and_grad(
    lambda params, x, y: loss_fn(params, x, y, "local"),
    topology.mesh,
)
tx = optax.chain(optax.sgd(0.1), jdaso.daso(exchange, 1, 0, wire="float32"))


@jax.jit
def step(params, state, x, y):
    loss, grads = value_and_grad(params, x, y)
    updates, state = tx.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state


replicated = NamedSharding(topology.mesh, PartitionSpec())
split = NamedSharding(topology.mesh, PartitionSpec("local"))
params = jax.device_put(jax.tree.map(np.asarray, first_params()), replicated)
state = jax.jit(tx.init, out_shardings=replicated)(params)
own, local = len(topology.devices), topology.num_local_devices
first = topology.node * local + topology.local_rank * own


def on_devices(arrays):
    return [jax.make_array_from_process_local_data(split, x) for x in arrays]


for t in range(STEPS):
    x, y = on_devices(joint(t, first, first + own))
    params, state = step(params, state, x, y)

expected = first_params()
for t in range(STEPS):
    parts = [joint(t, d, d + local) for d in range(0, devices, local)]
    grads = [jax.grad(loss_fn)(expected, *part) for part in parts]
    mean = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, mean)
# float32 means of batches that are cut up in another way, ten steps on end.
for name, value in expected.items():
    np.testing.assert_allclose(params[name], value, rtol=2e-5, atol=1e-6)
agreed = jdaso.consensus(exchange, params)
for leaf in jax.tree.leaves(agreed):
    bits = [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]
    assert len(set(bits + topology.comm.allgather(bits[0]))) == 1


def counts(params, x, y):
    """Integers of aux are summed over all devices of a node, as narrow ones and booleans are."""
    del y
    right = (x[:, 0] > 0).sum(dtype=jnp.int32)
    narrow = {"rows": len(x), "bytes": jnp.uint8(200), "any": jnp.array([True, False])}
    return jnp.mean(x @ params["first"]), {"right": right, "mean": x.mean(), **narrow}


own_counts = jax.jit(jdaso.local_value_and_grad(counts, topology.mesh, has_aux=True))
(_, aux), _ = own_counts(params, *on_devices(joint(0, first, first + own)))
aux = jax.tree.map(np.asarray, aux)
start = topology.node * local
x, _ = joint(0, start, start + local)
assert aux["right"] == (x[:, 0] > 0).sum() > 0
assert aux["rows"] == len(x)
np.testing.assert_allclose(aux["mean"], x.mean(), rtol=1e-5, atol=1e-7)
assert aux["bytes"] == 200 * local
assert aux["any"].tolist() == [local, 0]
assert (aux["bytes"].dtype, aux["any"].dtype) == (np.uint32, np.int32)
