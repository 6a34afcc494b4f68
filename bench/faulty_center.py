"""Runs workers around a center, with faults in some of them.

    mpiexec -disable-auto-cleanup -n 2 sh -c 'trap "" USR1; "$@"; exit $?' - \\
        python bench/faulty_center.py [--fault STUCK:1:17]

``bench/faults.py`` starts it and reads its output.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import optax
from faulty_training import STEP_SECONDS, STEPS, TIMEOUT, classifier, digits, fault, loss

import jdaso
from jdaso.faults import faulty, faulty_gradients

PERIOD, SILENT_SECONDS = 3, 6.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fault", type=fault, action="append", default=[], help=fault.__doc__)
    faults = parser.parse_args().fault
    topology = jdaso.discover_topology()
    rank = topology.rank
    center = jdaso.center.mpi_center(topology, timeout=TIMEOUT, gone_after=SILENT_SECONDS)
    make_exchange = center.make_exchange
    center.make_exchange = lambda rule: faulty(make_exchange(rule), faults, rank)
    averaging = jdaso.center.async_easgd(center, PERIOD)
    gradients = faulty_gradients(faults, rank)
    tx = jdaso.chain(optax.sgd(0.1), averaging)
    images, labels = digits()
    params = center.join(classifier())
    state = (params, tx.init(params), gradients.init(params))

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, step):
        params, opt_state, fault_state = state
        key = jax.random.fold_in(jax.random.key(1 + rank), step)
        value, grads = jax.value_and_grad(loss)(params, key, images, labels)
        grads, fault_state = gradients.update(grads, fault_state)
        return *jdaso.apply_gradients(tx, grads, opt_state, params, value=value), fault_state

    for step in range(STEPS):
        begin = time.monotonic()
        state = jax.block_until_ready(train_step(state, step))
        time.sleep(max(0.0, begin + STEP_SECONDS - time.monotonic()))
        print(f"rank {rank} has done {step + 1} steps", flush=True)
    left_out = jdaso.core.averaging_state(state[1]).left_out
    read = center.read(state[0])
    finite = all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((state[0], read.center)))
    print(f"rank {rank} ended, finite: {finite}, left out: {left_out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
