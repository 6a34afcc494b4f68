"""Every shard is in the staging buffers once, and is sent by one of the devices that hold it."""

from collections import Counter

import bad_shardings
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso
from jdaso.core.block_format import FORMATS
from jdaso.core.wire import rounded
from jdaso.exchange.host.layout import make_layout

SHAPES = ((4, 6), (8,), (), (12, 2, 4))
SPECS = {
    "replicated": (P(), P(), P(), P()),
    "one axis": (P("data"), P("data"), P(), P(None, "data")),
    "two axes": (P("data", "model"), P(("model", "data")), P(), P("model")),
}
NUMBERS = range(-1, 24)  # -1 is a consensus

jdaso.cluster.use_virtual_devices(4)
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
devices = list(mesh.devices.flat)
rng = np.random.default_rng(0)
leaves = [np.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES]

for name, specs in SPECS.items():
    layout = make_layout(SHAPES, (np.dtype(np.float32),) * len(SHAPES), specs, mesh)
    assert layout.replicated == (name == "replicated"), name
    shards = layout.cut(leaves)
    assert sum(shard.size for shard in shards) == sum(leaf.size for leaf in leaves)
    for joined, leaf in zip(layout.join(shards), leaves, strict=True):
        np.testing.assert_array_equal(joined, leaf)
    # The shards of a device are those that JAX places on it.
    for index, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        placed = jax.device_put(leaf, NamedSharding(mesh, spec))
        for shard in placed.addressable_shards:
            own = layout.shards_of(devices.index(shard.device))[index]
            np.testing.assert_array_equal(np.asarray(shard.data), shards[own])
    senders = Counter()
    for number in NUMBERS:
        sent = [
            (device, shard)
            for device in range(len(devices))
            for shard, sends in zip(
                layout.shards_of(device), layout.sent_by(device, number), strict=True
            )
            if sends
        ]
        assert sorted(shard for _, shard in sent) == list(range(len(shards))), (name, number)
        if number >= 0:
            senders.update(sent)
    # All devices that hold a shard send it equally often.
    for shard in range(len(shards)):
        counts = {count for (_, other), count in senders.items() if other == shard}
        assert len(counts) == 1, (name, shard, senders)

    for rows in FORMATS.values():
        blocks = make_layout(SHAPES, (rows.dtype,) * len(SHAPES), specs, mesh)
        once = blocks.join(blocks.cut(leaves))
        assert set(blocks.block_bits) == {rows.bits}
        for first, second in zip(once, blocks.join(blocks.cut(once)), strict=True):
            np.testing.assert_array_equal(first, second)
        if name == "replicated":
            for joined, leaf in zip(once, leaves, strict=True):
                np.testing.assert_array_equal(joined, rounded(leaf, rows.bits))

params = {"bias": np.ones(7, np.float32), "kernel": np.ones((8, 2), np.float32)}
given = {"bias": NamedSharding(mesh, P()), "kernel": NamedSharding(mesh, P("data"))}
topology = jdaso.discover_topology()
bad_shardings.check(topology, mesh, given, params)
exchange = jdaso.mpi_exchange(topology, shardings=given)
jdaso.dasgd(exchange, 4, 3).init(params)
jdaso.consensus(exchange, params["bias"])  # any other tree
