"""Ends with exchanges in flight that are lost, or with none.

lost.py lost|closed|saved|"saved too early"|"drained and restored"
"""

import functools
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdaso
from jdaso.checkpoint import Checkpoints

how = sys.argv[1]
topology = jdaso.discover_topology()
exchange = jdaso.mpi_exchange(topology)


def chain(exchange):
    return jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, period=4, delay=3, fragments=2))


def take_step(tx, params, state):
    return jdaso.apply_gradients(tx, params, state, params)


tx = chain(exchange)
params = {"w": jnp.full(3, 1.0 + topology.node), "b": jnp.ones(2)}
state = tx.init(params)
step = jax.jit(functools.partial(take_step, tx))
folder = topology.comm.bcast(tempfile.mkdtemp(), 0)
checkpoints = Checkpoints(folder, topology, exchange)
for t in range(1, 13):
    if how == "saved too early" and t == 12:
        checkpoints.save(t - 1, (params, state))
    params, state = step(params, state)
if how == "saved":
    checkpoints.save(12, (params, state))
checkpoints.close()
if how == "drained and restored":
    params, state = jdaso.drain(tx, state, params)
    # The state may now be saved by any means, here in memory, and restored with a new exchange.
    saved = jax.tree.map(np.asarray, (params, state))
    ends = []
    for start, used in ((params, state), exchange), (saved, jdaso.mpi_exchange(topology)):
        tx = chain(used)
        tx.init(params)
        step = jax.jit(functools.partial(take_step, tx))
        params, state = jax.tree.map(jnp.asarray, start)
        for _ in range(10):
            params, state = step(params, state)
        ends.append(jdaso.drain(tx, state, params))
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_array_equal(one, other)
if how == "closed":
    exchange.close()
print("passed")
