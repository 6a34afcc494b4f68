"""Exchanges that are closed give everything back; one too many that are not is an error.

closing.py closed|open
"""

import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import jdaso
from jdaso.cluster.barrier import barrier

MANY = 1000  # MPICH has 2048 communicators at most
topology = jdaso.discover_topology()
if sys.argv[1] == "open":
    kept = [jdaso.mpi_exchange(topology) for _ in range(MANY)]  # raises
first = jdaso.mpi_exchange(topology)
threads = threading.active_count()
for number in range(MANY):
    with jdaso.mpi_exchange(topology) as exchange:
        if number % 100 == 0:
            mean = jdaso.consensus(exchange, jnp.float32(topology.node))
            assert mean == (topology.num_nodes - 1) / 2
assert threading.active_count() == threads
with pytest.raises(Exception, match="the exchange is closed"):
    np.asarray(jdaso.consensus(exchange, jnp.float32(0)))
assert jdaso.consensus(first, jnp.float32(1)) == 1
first.close()
first.close()
barrier(topology, "the end")
