"""Compiled code and host callbacks give the same bits, in and outside shard_map."""

import argparse
import functools
import pickle
import sys
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import SGD, gradients, loss, saved_leaves
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[1]))
from one_process import use_stand_in

import jdaso
from jdaso.core import engine
from jdaso.core.tree import is_float

parser = argparse.ArgumentParser()
parser.add_argument("--moments", help="the wire of averaged momentum")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--algorithm", default="daso")
parser.add_argument("--dtypes", nargs="+", default=["float32"])
parser.add_argument("--x64", action="store_true", help="with numbers of 64 bits")
parser.add_argument("--wire", default="float32")
parser.add_argument("--blocking-wire", default="bfloat16")
parser.add_argument("--fragments", type=int, default=1)
parser.add_argument("--callbacks", required=True, help="folder that keeps what callbacks gave")
parser.add_argument(
    "--stand-in", help="library with the code for CUDA devices and a simulated driver"
)
arguments = parser.parse_args()
jax.config.update("jax_enable_x64", arguments.x64)
if arguments.devices > 1:
    jdaso.cluster.use_virtual_devices(arguments.devices)
topology = jdaso.discover_topology(processes_per_node=1)
if arguments.stand_in:
    stand_in = use_stand_in(arguments.stand_in, 0)
    stand_in.stand_in_set_delay(1000 if topology.node else 10000)
schedule = jdaso.cycling(period=4, delay=2, warmup=6, cooldown=6, total=30, epoch=6)


# Compiled code copies the leaves in two parts.
engine._LEAST_BYTES, engine._PARTS = 1, 2


def make_averaging(exchange):
    """DASO, or an algorithm whose merge has a state."""
    wire, fragments = arguments.wire, arguments.fragments
    if arguments.algorithm == "daso":
        return jdaso.daso(
            exchange,
            schedule=schedule,
            wire=wire,
            blocking_wire=arguments.blocking_wire,
            fragments=fragments,
        )
    if arguments.algorithm == "easgd":
        return jdaso.easgd(exchange, alpha=0.2, schedule=schedule, wire=wire)
    # The first treats each leaf separately and counts its steps. The second needs all leaves.
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.7, momentum=0.9))
    counted = optax.sgd(optax.linear_schedule(1.0, 0.1, 8), momentum=0.9, nesterov=True)
    outer = {"diloco": counted, "diloco clipped": clipped}[arguments.algorithm]
    options = {"schedule": schedule, "wire": wire, "mix": 0.25, "warmup": 2}
    return jdaso.diloco(exchange, outer=outer, fragments=fragments, **options)


def first_params():
    """Three leaves of float32, and one leaf of each other dtype, because each leaf takes time."""
    trees = common.first_params(arguments.dtypes)
    return {
        dtype: tree if dtype == "float32" else {"kernel": tree["kernel"]}
        for dtype, tree in trees.items()
    }


def bits(tree):
    return [np.asarray(x).tobytes() for x in saved_leaves(tree)]


def integers_of(tree):
    """Copies, because steps donate the arrays."""
    return [np.array(x) for x in jax.tree.leaves(tree) if not is_float(x)]


def run(compiled):
    """The state after every step."""
    exchange = jdaso.mpi_exchange(topology, native=compiled)
    averaging = make_averaging(exchange)
    # Integers are not trained. Their gradients are added to them as they are.
    optimizer = optax.masked(SGD, lambda tree: jax.tree.map(is_float, tree))
    moments = {"moments": "average", "moments_wire": arguments.moments} if arguments.moments else {}
    tx = jdaso.chain(optimizer, averaging, **moments)

    def step(params, state, grads, value):
        return jdaso.apply_gradients(tx, grads, state, params, value=value)

    if arguments.devices > 1:
        step = jax.shard_map(step, mesh=topology.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    step = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(lambda x: x * (1 + topology.node), first_params())
    params = jdaso.broadcast(exchange, params) if arguments.devices == 1 else params
    state = tx.init(params)
    first = (params, state, gradients(params, topology.node, 0), loss(topology.node, 0))
    # JAX dispatches programs with effects, such as callbacks, on a slower path.
    assert bool(jax.make_jaxpr(step)(*first).effects) == (not compiled)
    # Outside jit, JAX compiles callbacks anew at each call.
    consensus = jax.jit(functools.partial(jdaso.consensus, exchange))
    integers = integers_of(params)
    history = []
    blocked = stand_in.stand_in_blocking_bytes() if arguments.stand_in else 0
    for t in range(30):
        grads = gradients(params, topology.node, t)
        if skips := t == 20 and topology.node == 1:
            grads = jax.tree.map(lambda g: g * jnp.inf if is_float(g) else g, grads)
        if not skips:
            integers = [x + g for x, g in zip(integers, integers_of(grads), strict=True)]
        params, state = jax.block_until_ready(step(params, state, grads, loss(topology.node, t)))
        history.append(bits((params, jdaso.core.averaging_state(state))))
        # After a step whose copies may be under way.
        if t % 10 < 3:
            if arguments.stand_in:
                assert stand_in.stand_in_blocking_bytes() == blocked
            numbers = {"node": jnp.full(40, topology.node, jnp.float32)}
            mean = jdaso.consensus(exchange, numbers) if t == 20 else consensus(numbers)
            history[-1] += bits(mean)
            blocked = stand_in.stand_in_blocking_bytes() if arguments.stand_in else 0
        if t % 5 == 4:  # not after every step, because it waits for copies
            posted = {number: (p.step, p.leaves) for number, p in exchange.posted().items()}
            history[-1] += [b"in flight", *bits(posted)]
    assert bits(integers_of(params)) == bits(integers), "integers are not exchanged"
    assert exchange.report()["exchanges"] > 10
    assert (int(jdaso.core.averaging_state(state).skipped) > 0) == (topology.node == 1)
    return history


def run_with_callbacks():
    """The states with host callbacks, computed once for all libraries."""
    wires = f"{arguments.wire} {arguments.blocking_wire} {arguments.moments} {arguments.algorithm}"
    numbers = f"{'-'.join(arguments.dtypes)} {arguments.x64} {wires}"
    name = f"{arguments.devices} {numbers} {arguments.fragments} {topology.node}"
    kept = Path(arguments.callbacks, name)
    if not kept.exists():
        kept.write_bytes(pickle.dumps(run(False)))
    return pickle.loads(kept.read_bytes())


def alike(ours, theirs):
    """Equal bits. XLA may round an outer optimizer that it fuses with other things differently."""
    if arguments.algorithm.startswith("diloco") and len(ours) % 4 == 0:
        pair = [np.frombuffer(x, np.float32) for x in (ours, theirs)]
        return np.allclose(*pair, rtol=1e-5, atol=1e-6, equal_nan=True)
    return ours == theirs


with_compiled_code = run(True)
for t, (ours, theirs) in enumerate(zip(with_compiled_code, run_with_callbacks(), strict=True)):
    assert all(alike(*pair) for pair in zip(ours, theirs, strict=True)), f"step {t}"
