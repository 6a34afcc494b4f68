"""A run saved in flight by some nodes and restored by a number of others: the mean goes on.

other_nodes.py save|restore FOLDER NODES_THAT_SAVED WIRE
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from common import first_params, gradients

import jdaso
from jdaso.checkpoint import Checkpoints, at_step


def state_of(node, averaging, params):
    """Distinct floats and equal integers on every node."""
    shifted = jax.tree.map(lambda x: x + node, params)
    return {"params": shifted, "averaging": averaging.init(params), "seed": 7, "rate": node / 2}


def main(action, folder, saved, wire):
    topology = jdaso.discover_topology()
    exchange = jdaso.mpi_exchange(topology, timeout=60)
    averaging = jdaso.dasgd(exchange, period=4, delay=3, wire=wire)
    params = first_params()
    state = state_of(topology.node, averaging, params)
    checkpoints = Checkpoints(folder, topology, exchange)

    def step(state, t):
        grads = gradients(params, topology.node, t)
        updates, averaged = averaging.update(grads, state["averaging"], state["params"])
        moved = jax.tree.map(jnp.add, state["params"], updates)
        return {**state, "params": moved, "averaging": averaged}

    if action == "save":
        assert topology.num_nodes == int(saved)
        for t in range(4):
            state = step(state, t)
        jax.block_until_ready(state)  # or the last step may not have posted yet
        assert exchange.posted()
        # What is compared afterwards is simple; exchanges stay in flight.
        simple = jax.tree.map(lambda x: x + topology.node, params)
        checkpoints.save(4, {**state, "params": simple})
        checkpoints.close()
        jdaso.drain(averaging, state["averaging"], state["params"])
        return
    restored = checkpoints.restore(state)
    assert (restored.step, restored.num_nodes) == (4, int(saved))
    middle = (int(saved) - 1) / 2
    found = restored.state
    for x, start in zip(*map(jax.tree.leaves, (found["params"], params)), strict=True):
        np.testing.assert_allclose(x, start + middle, rtol=1e-6)
    assert (found["seed"], found["rate"]) == (7, middle / 2)
    assert not found["averaging"].fragments[0].posted
    assert not exchange.posted()
    found = {**found, "averaging": at_step(found["averaging"], 3)}
    for t in range(3, 12):
        found = step(found, t)
    assert int(found["averaging"].step) == 12
    assert int(found["averaging"].exchanges) == 4  # one before, and after steps 4, 8 and 12


main(*sys.argv[1:])
print("passed")
