"""Ends with exchanges in flight that are lost, or with none.

lost.py lost|closed|saved|"saved too early"|drained
"""

import sys
import tempfile

import jax
import jax.numpy as jnp
import optax

import jdaso
from jdaso.checkpoint import Checkpoints

how = sys.argv[1]
topology = jdaso.discover_topology()
exchange = jdaso.mpi_exchange(topology)
tx = jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, period=4, delay=3, fragments=2))
params = {"w": jnp.ones(3), "b": jnp.ones(2)}
state = tx.init(params)
step = jax.jit(lambda params, state: jdaso.apply_gradients(tx, params, state, params))
folder = topology.comm.bcast(tempfile.mkdtemp(), 0)
checkpoints = Checkpoints(folder, topology, exchange)
for t in range(1, 13):
    if how == "saved too early" and t == 12:
        checkpoints.save(t - 1, (params, state))
    params, state = step(params, state)
if how == "saved":
    checkpoints.save(12, (params, state))
checkpoints.close()
if how == "drained":
    params, state = jdaso.drain(tx, state, params)
if how == "closed":
    exchange.close()
print("passed")
