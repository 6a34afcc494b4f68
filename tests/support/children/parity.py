"""Runs of algorithms are the same over MPI as on a virtual cluster, which uses tx.update."""

import argparse
import functools

import common
import jax
import numpy as np
from common import (
    ALGORITHMS,
    SGD,
    assert_close,
    computed_once,
    daso,
    first_params,
    gradients,
    loss,
    make_step,
    run_on_axis,
)
from jax.sharding import NamedSharding, PartitionSpec

import jdaso

STEPS = 48
parser = argparse.ArgumentParser()
parser.add_argument("--algorithms", nargs="+", default=["daso"], help="or 'all' but daso")
parser.add_argument("--exchange", default="mpi", choices=("mpi", "mpi4jax"))
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--chunk-bytes", type=int, default=1 << 20)
parser.add_argument("--dtypes", nargs="+", default=["float32"])
parser.add_argument("--wires", nargs=2, default=["float32", "bfloat16"])
parser.add_argument("--delay", type=int, default=2)
parser.add_argument("--in-place", action="store_true", help="steps by jdaso.apply_gradients")
parser.add_argument("--bad", action="store_true", help="a gradient of node 1 is not finite")
arguments = parser.parse_args()
if arguments.bad:
    common.BAD = (1, 9)

if "float64" in arguments.dtypes:
    jax.config.update("jax_enable_x64", True)
jdaso.cluster.use_virtual_devices(arguments.devices)
topology = jdaso.discover_topology(processes_per_node=1)
replicated = NamedSharding(topology.mesh, PartitionSpec())
LEAVES = len(jax.tree.leaves(first_params(arguments.dtypes)))


def phases(exchange):
    """A run with phases, plateaus and flights."""
    schedule = jdaso.cycling(
        period=4, delay=arguments.delay, warmup=6, cooldown=6, total=STEPS, epoch=7, patience=0
    )
    wires = dict(zip(("wire", "blocking_wire"), arguments.wires, strict=True))
    return daso(exchange, schedule, **wires)


def all_in_flight(exchange):
    """A fragment for each leaf, and from the end of the first period on all are in flight."""
    return jdaso.chain(SGD, jdaso.dasgd(exchange, LEAVES, LEAVES, fragments=LEAVES))


def make_exchange():
    if arguments.exchange == "mpi":
        return jdaso.mpi_exchange(topology, chunk_bytes=arguments.chunk_bytes)
    return jdaso.exchange.mpi4jax_exchange(topology)


def check(build, steps):
    """Compares a run, and returns (period, fragments in flight) of each step."""
    exchange = make_exchange()
    tx = build(exchange)
    params = jax.device_put(first_params(arguments.dtypes), replicated)
    state = jax.device_put(tx.init(params), replicated)
    traces, history = [], []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(*args):
        traces.append(1)
        return make_step(tx, arguments.in_place)(*args)

    for t in range(steps):
        grads = jax.device_put(gradients(params, topology.node, t), replicated)
        params, state = step(params, state, grads, loss(topology.node, t))
        averaging = jdaso.core.averaging_state(state)
        in_flight = sum(bool(flight.posted) for flight in averaging.fragments)
        history.append((int(averaging.plan.period), in_flight))

    expected, expected_state = computed_once(
        topology,
        lambda: run_on_axis(topology.num_nodes, steps, build, first_params(arguments.dtypes)),
    )
    # bfloat16 and float16 parameters: a sum in another order may round to the neighbour.
    narrow = {"bfloat16": 2**-7, "float16": 2**-10}
    for dtype in arguments.dtypes:
        own = jax.tree.map(lambda x: x[topology.node], expected[dtype])
        assert_close(params[dtype], own, rtol=narrow.get(dtype, 1e-6))
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(leaf))
    assert len(traces) == 1, f"traced {len(traces)} times"
    mine, theirs = jdaso.core.averaging_state(state), jdaso.core.averaging_state(expected_state)
    for name in ("step", "exchanges", "skipped", "left_out"):
        assert int(getattr(mine, name)) == int(getattr(theirs, name)[topology.node]), name
    assert int(mine.exchanges) > 0
    assert (int(mine.skipped) > 0) == (arguments.bad and topology.node == 1)
    for flight, on_axis in zip(
        mine.fragments, theirs.fragments, strict=True
    ):  # centers and anchors
        own = jax.tree.map(lambda x: x[topology.node], on_axis.merge)
        assert_close(flight.merge, own)
    same = jdaso.consensus(exchange, params)
    root = jdaso.broadcast(exchange, same)
    for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(root), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.sharding == replicated
    return history


names = list(ALGORITHMS) if arguments.algorithms == ["all"] else arguments.algorithms
for name in names:
    print(name, flush=True)
    if name == "daso":
        periods = {period for period, _ in check(phases, STEPS)}
        assert {4, 2, 1} <= periods, "the run had no plateaus, it proves too little"
    elif name == "all in flight":
        most = max(in_flight for _, in_flight in check(all_in_flight, STEPS))
        assert most == LEAVES > 4, f"no more than {most} were in flight"
    else:
        check(ALGORITHMS[name], 22)
