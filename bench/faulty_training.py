"""A training with checkpoints and injected faults, which can be resumed.

    mpiexec -n 2 python bench/faulty_training.py --folder FOLDER [--fault STUCK:1:17]
    mpiexec -disable-auto-cleanup -n 2 sh -c 'trap "" USR1; "$@"; exit $?' - \\
        python bench/faulty_training.py --algorithm center [--fault STUCK:1:17]

Workers around a center have no checkpoints. ``bench/faults.py`` starts it and reads its output.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import optax
from machine import resident_bytes

import jdaso
from jdaso import faults

STEPS, SAVE_EVERY, BATCH, HIDDEN = 30, 5, 16, 64
STEP_SECONDS = 0.1  # shortest time of a step
TEST_IMAGES = 360
TIMEOUT = 12.0  # of exchanges; warnings are printed after half of it
CENTER_PERIOD, CENTER_SILENT_SECONDS = 3, 6.0
LAST_WORDS = 0.2
LAB = "10.77.0."
SLOW = "tbf rate 64kbit burst 3000 limit 1000000"

ALGORITHMS = {
    "daso": lambda exchange, steps: jdaso.daso(
        exchange,
        schedule=jdaso.cycling(4, warmup=steps // 3, cooldown=steps // 3, total=steps, delay=2),
    ),
    "dasgd": lambda exchange, steps: jdaso.dasgd(exchange, period=3, delay=2),
    "easgd": lambda exchange, steps: jdaso.easgd(exchange, period=3),
}


def link(fault: faults.Fault) -> None:
    """Disables or slows eth0. Refuses to do so outside the network lab."""
    own = subprocess.run(["ip", "addr", "show", "eth0"], capture_output=True, text=True).stdout
    if f"inet {LAB}" not in own:
        raise RuntimeError("a fault of a link requires the network lab: use bench/faults.py")
    if fault.kind is faults.Kind.LINK_DOWN:
        time.sleep(LAST_WORDS)  # so that the line about the fault is still transmitted
        do, undo = "ip link set eth0 down", "ip link set eth0 up"
    else:
        do, undo = f"tc qdisc add dev eth0 root {SLOW}", "tc qdisc del dev eth0 root"
    subprocess.run(do.split(), check=True)
    again = threading.Timer(fault.seconds, subprocess.run, [undo.split()])
    again.daemon = True
    again.start()


def fault(text: str) -> faults.Fault:
    """KIND:RANK:STEP or KIND:RANK:STEP:SECONDS."""
    kind, rank, step, *seconds = text.split(":")
    return faults.Fault(faults.Kind[kind], int(rank), int(step), *map(float, seconds))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", help="of the checkpoints")
    parser.add_argument("--algorithm", choices=[*ALGORITHMS, "center"], default="daso")
    parser.add_argument("--fault", type=fault, action="append", default=[], help=fault.__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY)
    parser.add_argument("--step-seconds", type=float, default=STEP_SECONDS)
    return parser.parse_args()


def digits() -> tuple[jax.Array, jax.Array]:
    """Flattened images and labels, in the same order on all nodes."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = jax.random.permutation(jax.random.key(2), len(labels))
    return jnp.asarray(images / 16.0, jnp.float32)[order], jnp.asarray(labels)[order]


def classifier() -> dict[str, jax.Array]:
    """Initial parameters, the same on all nodes."""
    keys = jax.random.split(jax.random.key(0))
    initial = jax.nn.initializers.he_normal()
    return {"in": initial(keys[0], (64, HIDDEN)), "out": initial(keys[1], (HIDDEN, 10))}


def scores(params, images: jax.Array) -> jax.Array:
    return jax.nn.relu(images @ params["in"]) @ params["out"]


def loss(params, key: jax.Array, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss of a random batch of the training images."""
    batch = jax.random.randint(key, (BATCH,), TEST_IMAGES, len(labels))
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(cross_entropy(scores(params, images[batch]), labels[batch]))


def make_step(tx, gradients, place: int):
    """Compiles a step. The batches of each place, a node or a worker, differ."""
    images, labels = digits()

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, step):
        params, opt_state, fault_state = state
        key = jax.random.fold_in(jax.random.key(1 + place), step)
        value, grads = jax.value_and_grad(loss)(params, key, images, labels)
        grads, fault_state = gradients.update(grads, fault_state)
        return *jdaso.apply_gradients(tx, grads, opt_state, params, value=value), fault_state

    def run(state, step: int, rank: int, seconds: float):
        begin = time.monotonic()
        state = jax.block_until_ready(train_step(state, step))
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        print(f"rank {rank} has done {step + 1} steps", flush=True)
        return state

    return run


def is_finite(tree) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree))


def train(options: argparse.Namespace, topology: jdaso.Topology) -> int:
    """Trains on all nodes, from the last checkpoint."""
    rank = topology.rank
    exchange = jdaso.mpi_exchange(topology, timeout=TIMEOUT)
    averaging = ALGORITHMS[options.algorithm](
        faults.faulty(exchange, options.fault, rank, link), options.steps
    )
    rate = optax.cosine_decay_schedule(0.1, options.steps)
    gradients = faults.faulty_gradients(options.fault, rank)
    tx = jdaso.chain(optax.sgd(rate, momentum=0.9), averaging)
    params = classifier()
    state = (params, tx.init(params), gradients.init(params))
    run = make_step(tx, gradients, topology.node)

    checkpoints = faults.FaultyCheckpoints(
        jdaso.checkpoint.Checkpoints(options.folder, topology, exchange), options.fault, rank
    )
    restored = checkpoints.restore(state)
    first = 0
    if restored:
        first, state = restored.step, restored.state
        print(f"rank {rank} resumed from step {first}", flush=True)
    stop = False
    with jdaso.cluster.Preemption() as preemption:
        for step in range(first, options.steps):
            state = run(state, step, rank, options.step_seconds)
            if stop := preemption.requested(exchange):
                checkpoints.save(step + 1, state)
                break
            if (step + 1) % options.save_every == 0:
                checkpoints.save(step + 1, state)
                print(f"rank {rank} holds {resident_bytes() / 1e6:.1f} MB", flush=True)
    checkpoints.close()
    averaged = jdaso.core.averaging_state(state[1])
    counts = f"skipped: {averaged.skipped}, left out: {averaged.left_out}"
    print(f"rank {rank} ended, finite: {is_finite(state[0])}, {counts}", flush=True)
    images, labels = (x[:TEST_IMAGES] for x in digits())
    right = scores(state[0], images).argmax(-1) == labels
    print(f"rank {rank} has {100 * float(right.mean()):.2f} % right", flush=True)
    return jdaso.cluster.EXIT_TRY_AGAIN if stop else 0


def work(options: argparse.Namespace, topology: jdaso.Topology) -> int:
    """Trains as one of the workers around a center."""
    rank = topology.rank
    center = jdaso.center.mpi_center(topology, timeout=TIMEOUT, gone_after=CENTER_SILENT_SECONDS)
    make_exchange = center.make_exchange
    center.make_exchange = lambda rule: faults.faulty(make_exchange(rule), options.fault, rank)
    gradients = faults.faulty_gradients(options.fault, rank)
    tx = jdaso.chain(optax.sgd(0.1), jdaso.center.async_easgd(center, CENTER_PERIOD))
    params = center.join(classifier())
    state = (params, tx.init(params), gradients.init(params))
    run = make_step(tx, gradients, rank)
    for step in range(options.steps):
        state = run(state, step, rank, options.step_seconds)
    left_out = jdaso.core.averaging_state(state[1]).left_out
    finite = is_finite((state[0], center.read(state[0]).center))
    print(f"rank {rank} ended, finite: {finite}, left out: {left_out}", flush=True)
    return 0


def main() -> int:
    options, topology = parse(), jdaso.discover_topology()
    return (work if options.algorithm == "center" else train)(options, topology)


if __name__ == "__main__":
    sys.exit(main())
