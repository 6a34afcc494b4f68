"""An exchange sends what a ring all-reduce in the wire dtype would, and sums in float32."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jdaso

wire = sys.argv[1]
topology = jdaso.discover_topology()
nodes, node = topology.num_nodes, topology.node
length = 100_003  # no multiple of anything
rng = np.random.default_rng(0)
posted = rng.normal(size=(nodes, length)).astype(np.float32)
rounded = posted.astype(jnp.dtype(wire))
for chunk_bytes in (1 << 10, 1 << 20):
    exchange = jdaso.mpi_exchange(topology, chunk_bytes=chunk_bytes)
    tx = jdaso.daso(exchange, jdaso.constant(1, 0), wire=wire)
    params = jnp.asarray(posted[node])
    updates, _ = jax.jit(tx.update)(jnp.zeros(length), tx.init(params), params)
    merged = np.asarray(params + updates, np.float64)

    total = rounded.astype(np.float64).sum(0)
    if wire == "float16":
        expected = (total / nodes).astype(np.float16)
    else:
        expected = total.astype(jnp.dtype(wire)).astype(np.float64) / nodes
    # One rounding on the way there is in `rounded`; what is left is that of the way back, of the
    # sum in float32, and of the update, which is added to parameters of another size.
    np.testing.assert_allclose(merged, expected.astype(np.float64), rtol=1e-5, atol=1e-6)

    itemsize = jnp.dtype(wire).itemsize
    sent = sum(topology.comm.allgather(exchange.report()["bytes_sent"]))
    assert sent == 2 * (nodes - 1) * length * itemsize, (sent, chunk_bytes)
