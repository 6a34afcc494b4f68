"""Sharded parameters are saved in flight and restored on another number of local devices.

sharded_checkpoint.py FOLDER DEVICES WIRE [joined]
The first run in a folder saves, and writes how its training ends. The others restore.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import assert_close, daso, gradients, loss, make_step
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso
from jdaso.checkpoint import Checkpoints

folder, devices, wire = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
joined = sys.argv[4:] == ["joined"]
SAVED_AT, STEPS = 10, 17
SPECS = {"bias": P(), "kernel": P("local"), "tensor": P(None, "local")}
jdaso.cluster.use_virtual_devices(1 if joined else devices)
topology = jdaso.discover_topology(devices if joined else None, join_processes=joined)
rng = np.random.default_rng(0)
shapes = {"bias": (7,), "kernel": (8, 64), "tensor": (4, 8, 6)}


def place(tree):
    return {
        name: jax.make_array_from_callback(
            np.shape(x), NamedSharding(topology.mesh, SPECS[name]), np.asarray(x).__getitem__
        )
        for name, x in tree.items()
    }


def whole(tree):
    """The tree with a copy of each parameter on each device."""
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(topology.mesh, P())), tree)


params = place({name: rng.normal(size=s).astype("float32") for name, s in shapes.items()})
exchange = jdaso.mpi_exchange(topology, shardings=SPECS)
tx = daso(exchange, jdaso.constant(period=4, delay=3), wire=wire)
step = jax.jit(make_step(tx))
state = tx.init(params)
checkpoints = Checkpoints(folder / "checkpoints", topology, exchange)
ends = folder / f"{topology.node}.npz"


def train(params, state, steps):
    for t in steps:
        grads = place(gradients(params, topology.node, t))
        params, state = step(params, state, grads, loss(topology.node, t))
    return params, state


if not ends.exists():
    # At each step, also where one device has collected an exchange and another one has not yet.
    for t in range(SAVED_AT):
        params, state = train(params, state, [t])
        checkpoints.save(t + 1, (params, state))
    assert len(exchange.posted()) == 1
    params, state = train(params, state, range(SAVED_AT, STEPS))
    checkpoints.wait()
    params = jax.tree.map(np.asarray, whole(params))
    if topology.local_rank == 0:
        np.savez(ends, devices=devices, **params)
    print(f"rank {topology.rank} saved")
else:
    params = jax.tree.map(jnp.zeros_like, params)
    restored = checkpoints.restore((params, tx.init(params)))
    assert restored.step == SAVED_AT
    params, state = train(*restored.state, range(SAVED_AT, STEPS))
    expected = dict(np.load(ends))
    # Other shards have other blocks of int8.
    same_blocks = expected.pop("devices") == devices or wire != "int8"
    assert_close(whole(params), expected, 1e-6 if same_blocks else 1e-2)
    print(f"rank {topology.rank} restored")
checkpoints.close()
