"""A training that goes on with fewer nodes, and then with more, from what was saved in flight.

going_on.py FOLDER NODES...   how many nodes each job had, the last one is this
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import ALGORITHMS, assert_close, daso, first_params, gradients, loss, make_step

import jdaso
from jdaso.checkpoint import Checkpoints

STEPS = 10  # of each job; after them an exchange is in flight
NAMES = {
    "daso": lambda exchange: daso(exchange, jdaso.constant(4, 3)),
    "easgd": ALGORITHMS["easgd"],
}


def is_averaging(node):
    return isinstance(node, jdaso.core.AveragingState)


def on_others(tree, fresh, nodes):
    """The mean over the nodes that there were, on those that there are, with nothing in flight."""

    def one(x):
        mean = np.asarray(x, np.float64).mean(axis=0).astype(x.dtype)
        return jnp.stack([mean if jnp.issubdtype(x.dtype, jnp.floating) else x[0]] * nodes)

    def land(state, new):
        if not is_averaging(state):
            return state
        flights = [
            flight._replace(posted=jnp.zeros(nodes, bool), exchange=empty.exchange)
            for flight, empty in zip(state.fragments, new.fragments, strict=True)
        ]
        return state._replace(fragments=tuple(flights))

    return jax.tree.map(land, jax.tree.map(one, tree), fresh, is_leaf=is_averaging)


def expected(make, jobs):
    """The whole training on virtual clusters, one after the other."""
    params, state = None, None
    for job, nodes in enumerate(jobs):
        tx = make(jdaso.axis_exchange("node", nodes))
        first = jax.tree.map(lambda x, n=nodes: jnp.stack([x] * n), first_params())
        fresh = jax.jit(jax.vmap(tx.init))(first)
        if params is None:
            params, state = first, fresh
        else:
            params, state = on_others((params, state), (first, fresh), nodes)
        step = jax.jit(jax.vmap(make_step(tx), axis_name="node"))
        for t in range(job * STEPS, (job + 1) * STEPS):
            like = first_params()
            grads = [gradients(like, node, t) for node in range(nodes)]
            grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
            params, state = step(
                params, state, grads, jnp.stack([loss(n, t) for n in range(nodes)])
            )
    return params, state


def main(folder, *jobs):
    topology = jdaso.discover_topology()
    jobs = [int(nodes) for nodes in jobs]
    assert topology.num_nodes == jobs[-1]
    begin = (len(jobs) - 1) * STEPS
    for name, make in NAMES.items():
        exchange = jdaso.mpi_exchange(topology, timeout=60)
        tx = make(exchange)
        params = first_params()
        state = tx.init(params)
        checkpoints = Checkpoints(Path(folder) / name, topology, exchange)
        restored = checkpoints.restore((params, state))
        if begin:
            assert (restored.step, restored.num_nodes) == (begin, jobs[-2])
            params, state = restored.state
        step = jax.jit(make_step(tx))
        for t in range(begin, begin + STEPS):
            grads = gradients(params, topology.node, t)
            params, state = step(params, state, grads, loss(topology.node, t))
        jax.block_until_ready(params)
        assert len(exchange.posted()) == 1
        checkpoints.save(begin + STEPS, (params, state))
        checkpoints.close()
        theirs, theirs_state = expected(make, jobs)
        assert_close(params, jax.tree.map(lambda x: x[topology.node], theirs))
        mine, virtual = map(jdaso.core.averaging_state, (state, theirs_state))
        for field in ("step", "exchanges"):
            assert getattr(mine, field) == getattr(virtual, field)[topology.node], field
        merge = jax.tree.map(lambda x: x[topology.node], virtual.fragments[0].merge)
        assert_close(mine.fragments[0].merge, merge)  # the center


main(*sys.argv[1:])
