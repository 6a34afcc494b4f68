"""Large arrays are rounded alike on a virtual cluster, on a mesh and over MPI, bit for bit.

A single process has a mesh whose two devices are the nodes. Numbers have few bits, so that sums and
quotients are exact, and only the wires and the narrow leaves round.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import computed_once
from jax.sharding import PartitionSpec as P

import jdaso
from jdaso.core import averaging_state

NODES, SIZE, STEPS, LR = 2, 12_000, 3, 2.0**-6
BLOCKING = jdaso.cycling(period=4, warmup=10, cooldown=10, total=100)
CASES = {
    "daso": lambda x: jdaso.daso(x, schedule=BLOCKING),
    "residuals of int8": lambda x: jdaso.daso(x, schedule=BLOCKING, wire="int8"),
    "delta rule": lambda x: jdaso.local_sgd(x, 2, 1, "delta", wire="bfloat16"),
    "float16": lambda x: jdaso.local_sgd(x, 1, wire="float16"),
    "allreduce_gradients": jdaso.allreduce_gradients,
}
jdaso.cluster.use_virtual_devices(NODES)  # of the mesh; over MPI a node has two
jax.config.update("jax_disable_most_optimizations", False)
topology = jdaso.discover_topology()


def numbers(seed):
    """Numbers of 13 bits, more than bfloat16 and float16 have."""
    values = 1 + np.random.default_rng(seed).integers(0, 2**12, SIZE) / 2**12
    return {dtype: jnp.asarray(values, dtype) for dtype in ("float32", "bfloat16", "float16")}


START = numbers(0)  # of all nodes


def gradients(node):
    return numbers(1 + node)


def trained(averaging, exchange, params, grads):
    """Parameters after some steps, what was rounded off, and the parameters' consensus."""
    tx = jdaso.chain(optax.sgd(LR), averaging)
    state = tx.init(params)
    for _ in range(STEPS):
        params, state = jdaso.apply_gradients(tx, grads, state, params)
    feedback = averaging_state(state).fragments[0].feedback
    return params, feedback.residual if feedback else [], jdaso.consensus(exchange, params)


def on_axis(make_averaging, over_nodes):
    exchange = jdaso.axis_exchange("node", NODES)
    run = functools.partial(trained, make_averaging(exchange), exchange)
    params, grads = [START] * NODES, [gradients(node) for node in range(NODES)]
    stacked = (jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (params, grads))
    return jax.jit(over_nodes(run))(*stacked)


def virtual_cluster(run):
    return jax.vmap(run, axis_name="node")


def mesh_of_devices(run):
    def one_node(*stacked):
        return jax.tree.map(lambda x: x[None], run(*jax.tree.map(lambda x: x[0], stacked)))

    mesh = jax.make_mesh((NODES,), ("node",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        one_node, mesh=mesh, in_specs=P("node"), out_specs=P("node"), check_vma=False
    )


for name, make_averaging in CASES.items():
    expected = computed_once(topology, lambda f=make_averaging: on_axis(f, virtual_cluster))
    if topology.num_nodes == 1:
        actual = on_axis(make_averaging, mesh_of_devices)
    else:
        exchange = jdaso.mpi_exchange(topology)
        run = jax.jit(functools.partial(trained, make_averaging(exchange), exchange))
        actual = run(START, gradients(topology.node))
        expected = jax.tree.map(lambda x: x[topology.node], expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        wrong = (np.asarray(x) != y).mean()
        assert wrong == 0, f"{name}: {wrong:.2%} of {x.dtype} differ"
    print(name, flush=True)
