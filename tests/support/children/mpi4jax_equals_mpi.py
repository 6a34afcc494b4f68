"""Blocking exchanges by mpi4jax and by the progress thread end with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common import daso, first_params, gradients, loss, make_step

import jdaso

topology = jdaso.discover_topology()
dtypes = ("float32", "bfloat16", "float16")
for wire in ("float32", "bfloat16", "float16"):
    results = []
    for exchange in (jdaso.mpi_exchange(topology), jdaso.exchange.mpi4jax_exchange(topology)):
        tx = daso(exchange, jdaso.constant(3, 0), wire=wire)
        params = {dtype: leaves["kernel"] for dtype, leaves in first_params(dtypes).items()}
        state = tx.init(params)
        step = jax.jit(make_step(tx))
        for t in range(12):
            grads = gradients(params, topology.node, t)
            params, state = step(params, state, grads, loss(topology.node, t))
        results.append((params, jdaso.consensus(exchange, params)))
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))

tx = jdaso.allreduce_gradients(jdaso.exchange.mpi4jax_exchange(topology), wire="int8")
with pytest.raises(ValueError, match="has no wires int8 and float4: use mpi_exchange"):
    tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
