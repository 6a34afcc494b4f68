"""Exchanges that are closed give everything back; one too many that are not is an error.

closing.py closed|open|"other order"|"at exit"|"one alone"|"steps not awaited"|finalized|programs
[DEVICES|"an exchange"|"a center"]
"""

import copy
import functools
import gc
import sys
import threading
import time

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso

MANY = 500  # each needs more than four communicators, and MPICH has 2048 at most
AHEAD = 100  # steps
if sys.argv[2:] == ["2"]:
    jdaso.cluster.use_virtual_devices(2)
topology = jdaso.discover_topology()


def take_steps(exchange):
    """Takes steps that are executed later; returns their last parameters."""
    tx = jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, 4, 3))
    params = jnp.full((300, 300), topology.node, jnp.float32)
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        return jdaso.apply_gradients(tx, jnp.tanh(params @ params), state, params)

    for _ in range(AHEAD):
        params, state = step(params, state)
    return params


if sys.argv[1] == "steps not awaited":
    with jdaso.mpi_exchange(topology) as exchange:
        params = take_steps(exchange)
    assert np.isfinite(params).all()
    del params
    # The others exit when their steps are still to be executed, and the results are gone.
    last = take_steps(jdaso.mpi_exchange(topology))
    if topology.rank == 0:
        assert np.isfinite(last).all()
    del last
    sys.exit()
if sys.argv[1] == "programs":
    for native in (True, False):
        counts = []
        for _ in range(4):
            with jdaso.mpi_exchange(topology, native=native) as exchange:
                tx = jdaso.chain(optax.sgd(0.1), jdaso.local_sgd(exchange, 1))
                params = jdaso.broadcast(exchange, jnp.zeros(3))
                step = jax.jit(functools.partial(jdaso.apply_gradients, tx))
                params, state = step(jnp.ones(3), tx.init(params), params)
                params, state = jdaso.drain(tx, state, params)
                jdaso.consensus(exchange, {"params": params}, state)
                jdaso.drift(exchange, params)
            del exchange, tx, step
            gc.collect()
            counts.append(len(jax.devices()[0].client.live_executables()))
        assert counts[1:] == counts[1:2] * 3, counts
    sys.exit()
if sys.argv[1] == "finalized":
    from mpi4py import MPI

    with jdaso.mpi_exchange(topology) as exchange:
        params = take_steps(exchange)
        beside = jdaso.mpi_exchange(topology)
        if topology.rank == 0:
            time.sleep(0.2)  # the others wait for it
        MPI.Finalize()
    assert np.isfinite(params).all()
    exchange.close()
    beside.close()
    print("came to its end")
    sys.exit()
if sys.argv[1] == "open":
    kept = [jdaso.mpi_exchange(topology) for _ in range(MANY)]  # raises
if sys.argv[1] == "one alone":
    exchange = jdaso.mpi_exchange(topology)
    create = jdaso.center.mpi_center if sys.argv[2] == "a center" else jdaso.mpi_exchange
    if topology.rank == 0:
        create(topology, timeout=2)  # raises
    time.sleep(100)
if sys.argv[1] == "other order":
    pair = [jdaso.mpi_exchange(topology) for _ in range(2)]
    pair[topology.rank].close()  # raises
if sys.argv[1] == "at exit":
    pair = [jdaso.mpi_exchange(topology) for _ in range(2)]
    if topology.rank == 1:
        pair[0].close()  # rank 0 closes the other one first
    sys.exit()
first = jdaso.mpi_exchange(topology)
threads = threading.active_count()
for number in range(MANY):
    with jdaso.mpi_exchange(topology) as exchange:
        if number % 100 == 0:
            mean = jdaso.consensus(exchange, jnp.float32(topology.node))
            assert mean == (topology.num_nodes - 1) / 2
for _ in range(1100):  # of two communicators
    with jdaso.exchange.mpi4jax_exchange(topology):
        pass
assert threading.active_count() == threads
with pytest.raises(Exception, match="the exchange is closed"):
    np.asarray(jdaso.consensus(exchange, jnp.float32(0)))
assert jdaso.consensus(first, jnp.float32(1)) == 1
for each in (first, exchange):  # open and closed
    assert copy.deepcopy(each) is each
    with pytest.raises(TypeError, match="an exchange that connects processes"):
        cloudpickle.dumps(jdaso.local_sgd(each, 2))
together = [threading.Thread(target=first.close) for _ in range(4)]
for thread in together:
    thread.start()
for thread in together:
    thread.join()
first.close()
topology.group.barrier("the end")
