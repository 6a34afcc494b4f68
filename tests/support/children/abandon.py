"""Nodes leave a training at different steps, and train again.

abandon.py sweep|alone|consensus DEVICES
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso

what, devices = sys.argv[1], int(sys.argv[2])
if devices > 1:
    jdaso.cluster.use_virtual_devices(devices)
topology = jdaso.discover_topology(processes_per_node=1)
node = topology.node


class Diverged(Exception):
    """What a program raises when a trial fails."""


def train(exchange, steps, period, delay, until=None):
    """The parameters after some steps, and those that ``drain`` makes of them."""
    tx = jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, period, delay))
    params = {"w": jnp.full(300, float(node)), "b": jnp.zeros((3, 4))}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        return jdaso.apply_gradients(tx, jax.tree.map(jnp.ones_like, params), state, params)

    for t in range(steps):
        if t == until:
            kept.append(params)
            raise Diverged
        params, state = step(params, state)
    return params, jdaso.drain(tx, state, params)[0]


kept = []
with jdaso.mpi_exchange(topology) as exchange:
    _, expected = train(exchange, 8, 4, 3)
if what == "sweep":
    # Each node may be ahead, by more than an exchange, and with some in flight.
    for period, delay, stops in ((1, 1, (3, 9)), (4, 3, (10, 5)), (2, 0, (7, 7)), (3, 2, (0, 8))):
        with pytest.raises(Diverged), jdaso.mpi_exchange(topology) as exchange:
            train(exchange, 20, period, delay, stops[node % 2])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept.pop()))
        with pytest.raises(Exception, match="the exchange is closed"):
            np.asarray(jdaso.consensus(exchange, jnp.float32(0)))
    # One node completes its trial, and closes as usual.
    if node == 0:
        with pytest.raises(Diverged), jdaso.mpi_exchange(topology) as exchange:
            train(exchange, 8, 2, 1, until=3)
    else:
        with jdaso.mpi_exchange(topology) as exchange:
            params, _ = train(exchange, 8, 2, 1)
        assert np.isfinite(params["w"]).all()
    # A call, in place of the end of a block.
    exchange = jdaso.mpi_exchange(topology)
    with pytest.raises(Diverged):
        train(exchange, 20, 4, 3, until=5 + 4 * node)
    exchange.close(abandon=True)
    exchange.close()
    # The next exchange has nothing of these.
    with jdaso.mpi_exchange(topology) as exchange:
        _, params = train(exchange, 8, 4, 3)
    np.testing.assert_array_equal(params["w"], expected["w"])
if what == "alone":
    with jdaso.mpi_exchange(topology) as exchange:
        params, _ = train(exchange, 400, 2, 1, until=5 if node == 0 else None)
        np.asarray(params["w"])
if what == "consensus":
    with jdaso.mpi_exchange(topology) as exchange:
        if node == 0:
            raise Diverged
        np.asarray(jdaso.consensus(exchange, jnp.float32(1)))
