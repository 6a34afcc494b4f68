"""A run that is saved in flight and restored, on other exchanges, ends with the same bits.

checkpoint.py FOLDER SAVED_AT ALGORITHM...
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from common import (
    ALGORITHMS,
    daso,
    first_params,
    gradients,
    loss,
    make_step,
    saved_leaves,
)

import jdaso
from jdaso.checkpoint import Checkpoints

STEPS = 23


def cycling(exchange):
    schedule = jdaso.cycling(
        period=4, delay=3, warmup=3, cooldown=2, total=22, epoch=10, patience=0
    )
    return daso(exchange, schedule)


def main(folder, saved_at, *names):
    topology = jdaso.discover_topology()
    for name in names:
        make = ALGORITHMS.get(name, cycling)
        start = first_params(("float32", "bfloat16"))
        start["empty"] = jnp.zeros((0, 3))
        start["whole"] = jnp.arange(3)  # the first step widens its moment

        def train(params, state, steps, step, topology=topology):
            for t in steps:
                grads = gradients(params, topology.node, t)
                params, state = step(params, state, grads, loss(topology.node, t))
            return params, state

        def fresh(make=make, start=start, topology=topology):
            exchange = jdaso.mpi_exchange(topology)
            tx = make(exchange)
            step = jax.jit(make_step(tx), donate_argnums=(0, 1))
            params = jax.tree.map(lambda x: x.copy(), start)
            return exchange, functools.partial(train, step=step), (params, tx.init(params))

        exchange, run, first = fresh()
        checkpoints = Checkpoints(Path(folder) / name, topology, exchange, keep=1)
        assert checkpoints.restore(first) is None
        half = run(*first, range(int(saved_at)))
        checkpoints.save(int(saved_at), half)
        in_flight = len(exchange.posted())
        expected = run(*half, range(int(saved_at), STEPS))
        checkpoints.close()

        exchange, run, like = fresh()
        checkpoints = Checkpoints(Path(folder) / name, topology, exchange)
        restored = checkpoints.restore(like)
        assert (restored.step, restored.num_nodes) == (int(saved_at), topology.num_nodes)
        found = run(*restored.state, range(int(saved_at), STEPS))
        for want, got in zip(*map(saved_leaves, (expected, found)), strict=True):
            assert want.dtype == got.dtype
            np.testing.assert_array_equal(np.asarray(want), np.asarray(got))
        checkpoints.close()
        print(f"rank {topology.rank}: {name} passed, {in_flight} in flight")


main(*sys.argv[1:])
