"""Parameters that are sharded over the devices of a node.

sharded.py DEVICES ALGORITHM... [--joined] [--bits FOLDER]

With ``--joined`` each device has a process of its own, and those of a node are one JAX program. A
run on two devices without it saves the parameters of each training in the folder. Joined processes
must reach the same bits. The folder also keeps the results of virtual clusters, for all runs.
"""

import argparse
import functools
import pickle
import re
from pathlib import Path

import bad_shardings
import common
import jax
import jax.numpy as jnp
import numpy as np
from common import (
    ALGORITHMS,
    SGD,
    assert_close,
    computed_once,
    daso,
    gradients,
    loss,
    make_step,
    run_on_axis,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso

# Shards along the first axis end where blocks of the wire int8 end.
SHAPES = {"bias": (7,), "kernel": (8, 64), "scale": (), "tensor": (4, 6, 8), "wide": (3, 8)}
BUILD = {
    **ALGORITHMS,
    "daso": lambda exchange: daso(exchange, jdaso.constant(period=3, delay=2)),
    "daso at once": lambda exchange: daso(exchange, jdaso.constant(period=3, delay=0)),
    # A gradient of node 1 is not finite, and what is in flight at the end is merged.
    "bad and drained": lambda exchange: jdaso.chain(SGD, jdaso.dasgd(exchange, 4, 3)),
}
STEPS = 14

parser = argparse.ArgumentParser()
parser.add_argument("devices", type=int)
parser.add_argument("algorithms", nargs="*", default=list(BUILD))
parser.add_argument("--joined", action="store_true")
parser.add_argument("--bits", type=Path, required=True)
arguments = parser.parse_args()
joined = arguments.joined
jdaso.cluster.use_virtual_devices(1 if joined else arguments.devices)
topology = jdaso.discover_topology(arguments.devices if joined else None, join_processes=joined)
assert topology.joined == joined
assert topology.mesh.size == topology.num_local_devices == arguments.devices
rng = np.random.default_rng(0)
first = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in SHAPES.items()}
if arguments.devices == 2:
    mesh = topology.mesh
    specs = {
        "bias": P(),
        "kernel": P("local"),
        "scale": P(),
        "tensor": P(None, "local"),
        "wide": P(),
    }
    given = specs
else:
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    specs = {
        "bias": P(),
        "kernel": P("data"),
        "scale": P(),
        "tensor": P("tensor", "data"),
        "wide": P(None, ("data", "tensor")),
    }
    given = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
places = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def by_path(path, leaf):
    del leaf
    return given[path[-1].key]


def place(tree):
    make = jax.make_array_from_callback
    return {
        name: make(np.shape(x), places[name], np.asarray(x).__getitem__) for name, x in tree.items()
    }


def shards(tree, whole=None):
    """The shards of this process, or the same parts of another tree."""
    return {
        (name, shard.device.id): np.asarray(
            shard.data if whole is None else whole[name][shard.index]
        )
        for name, x in tree.items()
        for shard in x.addressable_shards
    }


def train(tx, step, params, state, steps):
    for t in steps:
        grads = place(gradients(params, topology.node, t))
        params, state = step(params, state, grads, loss(topology.node, t))
    return params, state


def drain(tx, params, state):
    return jdaso.drain(tx, state, params)


def gathers_and_callbacks(compiled):
    text = compiled.as_text()
    return re.findall("all-gather|all-to-all|callback", text)


def on_virtual_cluster(name):
    """The parameters that a virtual cluster reaches, computed once for all runs."""
    kept = arguments.bits / f"{name}.pickle"
    if not kept.exists():
        params, state = run_on_axis(topology.num_nodes, STEPS, BUILD[name], first)
        if "drained" in name:
            tx = BUILD[name](jdaso.axis_exchange("node", topology.num_nodes))
            params, _ = jax.vmap(functools.partial(drain, tx), axis_name="node")(params, state)
        kept.write_bytes(pickle.dumps(jax.tree.map(np.asarray, params)))
    return pickle.loads(kept.read_bytes())


def compare(name, params):
    """Compares with a virtual cluster, whose leaves are not sharded, or with saved bits."""
    file = arguments.bits / f"{name} {topology.node}.npz"
    if joined and "int8" not in name:  # other nodes keep the rounding errors of int8
        expected = dict(np.load(file))
        for key, own in shards(params).items():
            np.testing.assert_array_equal(own, shards(params, expected)[key], f"{name} {key}")
        return
    expected = computed_once(topology, functools.partial(on_virtual_cluster, name))
    expected = jax.tree.map(lambda x: x[topology.node], expected)
    # With int8, the numbers of a shard that is not contiguous form other blocks.
    other = {"tensor", "wide"} if "int8" in name else set()
    for leaves, rtol in ((params.keys() - other, 1e-6), (other, 1e-2)):
        own = {leaf: params[leaf] for leaf in leaves}
        assert_close(shards(own), shards(own, expected), rtol)
    if arguments.devices == 2 and not joined:
        np.savez(file, **params)


for number, name in enumerate(arguments.algorithms):
    build = BUILD[name]
    exchange = jdaso.mpi_exchange(topology, shardings=by_path if number % 2 else given)
    tx = build(exchange)
    params = place(first)
    state = tx.init(params)
    args = (params, state, place(gradients(params, topology.node, 0)), loss(topology.node, 0))
    step = jax.jit(make_step(tx), donate_argnums=(0, 1)).lower(*args).compile()
    assert not gathers_and_callbacks(step), (name, gathers_and_callbacks(step))
    common.BAD = (1, 9) if "bad" in name else None
    params, state = train(tx, step, params, state, range(STEPS))
    if "drained" in name:
        assert jdaso.core.averaging_state(state).fragments[0].posted
        params, state = drain(tx, params, state)
    for leaf, x in params.items():
        assert x.sharding.is_equivalent_to(places[leaf], x.ndim), (name, leaf, x.sharding)
    compare(name, params)
    common.BAD = None
    exchange.close()

# The same inside the user's own shard_map, where the parameters are a device's shards. Fragments
# and blocks of int8 do not depend on the mesh and the processes, so only one run has them.
INSIDE = ("daso", "dasgd fragments", "easgd", "dasgd int8")
for name in INSIDE if arguments.devices == 2 and not joined else ("daso", "easgd"):
    native = False if name == "easgd" else None  # host callbacks do the same
    exchange = jdaso.mpi_exchange(topology, shardings=given, native=native)
    tx = BUILD[name](exchange)
    params = place(first)
    state = tx.init(params)
    like = jax.tree.map(
        lambda x: x.sharding.spec if isinstance(x.sharding, NamedSharding) else P(), state
    )
    inside = jax.shard_map(
        make_step(tx),
        mesh=mesh,
        in_specs=(specs, like, specs, P()),
        out_specs=(specs, like),
        check_vma=False,
    )
    step = jax.jit(inside, donate_argnums=(0, 1))
    params, state = train(tx, step, params, state, range(STEPS))
    compare(name, params)
    exchange.close()

exchange = jdaso.mpi_exchange(topology, shardings=given)
own = place(jax.tree.map(lambda x: x + topology.node, first))
middle = (topology.num_nodes - 1) / 2
mean = jdaso.consensus(exchange, own)
assert_close(shards(mean), shards(mean, {name: x + middle for name, x in first.items()}))
assert all(x.sharding.is_equivalent_to(places[name], x.ndim) for name, x in mean.items())
sent = jdaso.broadcast(exchange, own, root=1)
expected = {name: np.asarray(x + 1) for name, x in first.items()}
jax.tree.map(np.testing.assert_array_equal, shards(sent), shards(sent, expected))
assert all(x.sharding.is_equivalent_to(places[name], x.ndim) for name, x in sent.items())
count = sum(x.size for x in first.values())
distance = float(jdaso.drift(exchange, own))
assert abs(distance - abs(topology.node - middle) * count**0.5) < 1e-4
exchange.close()

bad_shardings.check(topology, mesh, given, first)
print(f"rank {topology.rank} passed")
