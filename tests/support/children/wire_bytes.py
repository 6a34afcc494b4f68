"""An exchange sends the least that an all-reduce in the wire dtype can, and sums in float32."""

import argparse

import compile_in_turn  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np

import jdaso
from jdaso.core.block_format import FORMATS
from jdaso.core.wire import block_bits, rounded

parser = argparse.ArgumentParser()
parser.add_argument("wire")
arguments = parser.parse_args()
wire = arguments.wire
topology = jdaso.discover_topology(1)
nodes, node = topology.num_nodes, topology.node
length = 100_003  # no multiple of anything
rng = np.random.default_rng(0)
posted = rng.normal(size=(nodes, length)).astype(np.float32)


def exact(dtype):
    """The mean as it should be, but for what the sum is rounded in float32."""
    total = posted.astype(jnp.dtype(dtype)).astype(np.float64).sum(0)
    if dtype == "float16":
        return (total / nodes).astype(np.float16).astype(np.float64)
    return total.astype(jnp.dtype(dtype)).astype(np.float64) / nodes


for chunk_bytes in (1 << 10, 1 << 20):
    exchange = jdaso.mpi_exchange(topology, chunk_bytes=chunk_bytes)
    own = jnp.asarray(posted[node])
    if wire in FORMATS:
        # Gradients: the first mean of parameters would travel in float32.
        tx = jdaso.allreduce_gradients(exchange, wire=wire)
        merged, _ = jax.jit(tx.update)(own, tx.init(own))
        total = sum(rounded(each, block_bits(wire)) for each in posted)
        expected = rounded(total, block_bits(wire)) / nodes
        row_bytes = {"int8": 65, "float4": 33}[wire]
        size = -(-length // 64) * row_bytes
        assert abs(size / (length * row_bytes / 64) - 1) < 0.01
    else:
        tx = jdaso.daso(exchange, 1, 0, wire=wire)
        updates, _ = jax.jit(tx.update)(jnp.zeros(length), tx.init(own), own)
        merged, expected = own + updates, exact(wire)
        size = length * jnp.dtype(wire).itemsize
    # One rounding on the way there is in `expected`, and that of the way back; what is left is
    # that of the sum in float32, and of the update, which is added to parameters of another size.
    error = np.abs(np.asarray(merged, np.float64) - expected)
    bound = 1e-6 + 1e-5 * np.abs(expected)
    assert (error <= bound).all(), error.max()

    sent = topology.comm.allgather(exchange.report()["bytes_sent"])
    assert sum(sent) == 2 * (nodes - 1) * size, (sent, chunk_bytes)
    per_node = 2 * (nodes - 1) / nodes * size
    np.testing.assert_allclose(sent, per_node, rtol=0.01)
