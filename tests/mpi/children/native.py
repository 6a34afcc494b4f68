"""Compiled code and host callbacks give the same bits, in and outside shard_map."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from common import daso, first_params, gradients, loss, make_step
from jax.sharding import PartitionSpec as P

import jdaso
from jdaso.exchange import _native, _program

parser = argparse.ArgumentParser()
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--dtypes", nargs="+", default=["float32"])
parser.add_argument("--wire", default="float32")
parser.add_argument("--blocking-wire", default="bfloat16")
parser.add_argument("--fragments", type=int, default=1)
parser.add_argument("--stand-in", help="library with the code for CUDA devices, and a driver")
arguments = parser.parse_args()
if arguments.devices > 1:
    jdaso.use_virtual_devices(arguments.devices)
topology = jdaso.discover_topology(processes_per_node=1)
if arguments.stand_in:
    library = _native._open(arguments.stand_in, {"cpu": "_cuda"})
    assert not isinstance(library, str), library
    assert library.jdaso_driver(arguments.stand_in.encode()) is None
    library.stand_in_late(1000 if topology.node else 30000)
    _native._load = lambda: library
    _program.Desk = lambda carrier, platform: _native.Desk(carrier, "gpu")
schedule = jdaso.cycling(period=4, delay=2, warmup=6, cooldown=6, total=30, epoch=6)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def run(native):
    """What every step leaves behind."""
    exchange = jdaso.mpi_exchange(topology, native=native)
    wires = {"wire": arguments.wire, "blocking_wire": arguments.blocking_wire}
    tx = daso(exchange, schedule, fragments=arguments.fragments, **wires)
    step = make_step(tx)
    if arguments.devices > 1:
        step = jax.shard_map(step, mesh=topology.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(lambda x: x * (1 + topology.node), first_params(arguments.dtypes))
    params = jdaso.broadcast(exchange, params) if arguments.devices == 1 else params
    state = tx.init(params)
    first = (params, state, gradients(params, topology.node, 0), loss(topology.node, 0))
    # Programs with effects, as callbacks are, are dispatched the slow way.
    assert bool(jax.make_jaxpr(step)(*first).effects) == (not native)
    history = []
    waited = library.stand_in_waited_for() if arguments.stand_in else 0
    for t in range(30):
        grads = gradients(params, topology.node, t)
        if t == 20 and topology.node == 1:  # from now on its momentum is infinite: it is left out
            grads = jax.tree.map(lambda g: g * jnp.inf, grads)
        params, state = jax.block_until_ready(step(params, state, grads, loss(topology.node, t)))
        history.append(bits((params, jdaso.averaging_state(state))))
        if t % 5 < 3:  # right after a step whose copies may be under way; the mean is blocking
            if arguments.stand_in:
                assert library.stand_in_waited_for() == waited
            mean = jdaso.consensus(exchange, {"node": jnp.full(40, topology.node, jnp.float32)})
            history[-1] += bits(mean)
            waited = library.stand_in_waited_for() if arguments.stand_in else 0
        if t % 5 == 4:  # and not after every step, as it waits for copies
            posted = {number: (p.step, p.leaves) for number, p in exchange.posted().items()}
            history[-1] += [b"in flight", *bits(posted)]
    assert exchange.report()["exchanges"] > 10
    assert (int(jdaso.averaging_state(state).skipped) > 0) == (topology.node == 1)
    return history


compiled, called = run(True), run(False)
for t, (ours, theirs) in enumerate(zip(compiled, called, strict=True)):
    assert ours == theirs, f"step {t}"
