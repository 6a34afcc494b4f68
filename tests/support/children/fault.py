"""One thing goes wrong between nodes; how the job ends is for the test to judge."""

import logging
import os
import sys
import threading
import time

import compile_in_turn  # noqa: F401
import jax
import jax.numpy as jnp
import mpi4py
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from oversleep import oversleep

import jdaso
from jdaso.core.error_feedback import Feedback
from jdaso.exchange.transport import progress

case = sys.argv[1]
if case.startswith("not initialized"):
    mpi4py.rc.initialize = False
if case == "not initialized imported":
    from mpi4py import MPI
if case == "late to discover_topology" and os.environ.get("PMI_RANK") == "1":
    time.sleep(8)
if case == "thread level":
    mpi4py.rc.thread_level = "single"
if case in ("unequal devices", "no thread"):
    from mpi4py import MPI
if case == "unequal devices":
    jdaso.cluster.use_virtual_devices(1 + MPI.COMM_WORLD.Get_rank())
if case == "no thread":
    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "jdaso-heartbeat":
            raise RuntimeError("can't start new thread")
        start(thread)

    if MPI.COMM_WORLD.Get_rank() == 1:
        threading.Thread.start = refuse
if case.endswith("two devices"):
    jdaso.cluster.use_virtual_devices(2)
topology = jdaso.discover_topology(2 if case == "uneven nodes" else None)
STARTS = ("not initialized", "late to discover_topology")
rank = topology.rank
timeout, same_bits = 3 if case.startswith("stuck") else 60, "other hardware" not in case
exchange = jdaso.mpi_exchange(topology, timeout=timeout, same_bits=same_bits)


def train(steps, schedule, params=None, between=lambda t: None, bad_step=-1, **options):
    tx = optax.chain(optax.sgd(0.1), jdaso.daso(exchange, schedule=schedule, **options))
    params = {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(3)} if params is None else params
    params = jax.device_put(params, NamedSharding(topology.mesh, PartitionSpec()))
    state = tx.init(params)

    @jax.jit
    def step(params, state, scale=1.0):
        grads = jax.tree.map(lambda p: scale * jnp.ones_like(p), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(steps):
        between(t)
        params, state = step(params, state, jnp.nan if t == bad_step else 1.0)
        jax.block_until_ready(params)
    return params, state, step


if case == "other shape":
    train(1, jdaso.constant(1), {"kernel": jnp.ones((4, 2 + rank)), "bias": jnp.ones(3)})
elif case == "other structure":
    train(1, jdaso.constant(1), {"kernel": jnp.ones(3)} | ({"bias": jnp.ones(3)} if rank else {}))
elif case == "other dtype":
    train(1, jdaso.constant(1), {"kernel": jnp.ones(3, jnp.bfloat16 if rank else jnp.float32)})
elif case == "other schedule":
    train(8, jdaso.constant(2 + 2 * rank))
elif case == "other wire":
    train(8, jdaso.constant(2), wire=("float32", "bfloat16")[rank])
elif case == "other chunks":
    jdaso.mpi_exchange(topology, chunk_bytes=(16, 32)[rank])
elif case == "other delay":
    train(8, jdaso.constant(2, 1 + rank))
elif case.startswith(("other center", "other anchor", "other parameters")):
    averaging = {
        "other center": lambda: jdaso.easgd(exchange, 2),
        "other anchor": lambda: jdaso.diloco(exchange, 2),
        "other parameters": lambda: jdaso.allreduce_gradients(exchange),
    }[case.removesuffix(", other hardware")]()
    params = jnp.full(3, 1.0 + rank)  # not broadcast
    state, update = averaging.init(params), jax.jit(averaging.update)
    for _ in range(6):
        _, state = jax.block_until_ready(update(jnp.ones(3), state, params))
elif case == "other mean of differences":

    def moved(x):
        return x._replace(anchor=[a + rank for a in x.anchor]) if isinstance(x, Feedback) else x

    params, state, step = train(4, jdaso.constant(2), wire="int8")
    state = jax.tree.map(moved, state, is_leaf=lambda x: isinstance(x, Feedback))
    for _ in range(4):
        params, state = jax.block_until_ready(step(params, state))
elif case.startswith("other step at a consensus"):
    params, state, _ = train(3 + rank, jdaso.constant(100))
    jdaso.consensus(exchange, params)  # without where it is nobody compares
    jdaso.consensus(exchange, params, state)
elif case.startswith("other schedule at a consensus"):
    averaging = jdaso.daso(
        exchange, schedule=jdaso.cycling(2, warmup=0, cooldown=0, total=100, epoch=10)
    )
    state = averaging.init(jnp.ones(3))
    jdaso.consensus(exchange, jnp.ones(3), state)
    seen = state.schedule._replace(best=jnp.float32(1 + rank))
    jdaso.consensus(exchange, jnp.ones(3), state._replace(schedule=seen))
elif case == "other plateau":
    schedule = jdaso.cycling(period=2, warmup=0, cooldown=0, total=100, epoch=10)
    averaging = jdaso.daso(exchange, schedule=schedule)
    state = averaging.init(jnp.ones(3))
    seen = state.schedule._replace(best=jnp.float32(1 + rank))
    state, update = state._replace(schedule=seen), jax.jit(averaging.update)
    for _ in range(4):
        _, state = jax.block_until_ready(update(jnp.ones(3), state, jnp.ones(3)))
elif case == "broadcast of other trees":
    jdaso.broadcast(exchange, {"kernel": jnp.ones(3)} | ({"bias": jnp.ones(3)} if rank else {}))
elif case == "other number, two devices":
    tx = jdaso.daso(exchange, 1, 0)
    state = tx.init(jnp.ones(3))
    try:
        params = jax.device_put(jnp.ones(3), topology.devices[0])  # of both
        jax.jit(tx.update)(jnp.ones(3), state, params)
    except ValueError as error:
        print(error, flush=True)
    # Rank 1 is one exchange ahead of rank 0, as after a restart from unequal checkpoints.
    state = state._replace(exchanges=state.exchanges + rank)
    jax.block_until_ready(jax.jit(tx.update)(jnp.ones(3), state, jnp.ones(3)))
elif case in ("stuck", "stuck, two devices"):
    train(4, jdaso.constant(2), between=lambda t: oversleep() if rank and t == 1 else None)
elif case == "consensus beside an exchange":
    progress._DEADLOCK_SECONDS = 1.0
    params, state, step = train(2, jdaso.constant(2))
    if rank == 1:
        jdaso.consensus(exchange, params)
    for _ in range(4):
        params, state = jax.block_until_ready(step(params, state))
elif case == "devices behind their program":
    # The program of rank 0 waits in a broadcast, while its devices have yet to post an exchange.
    progress._DEADLOCK_SECONDS = 0.5
    tx = optax.chain(optax.sgd(0.1), jdaso.daso(exchange, 1, 0))

    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, 60, lambda i, y: y @ y / 700, x))

    def sleep(x):
        time.sleep(5.0 if rank == 0 and x[0] else 0.0)
        return x

    @jax.jit
    def step(params, state, x):
        grads = jax.pure_callback(sleep, jax.ShapeDtypeStruct((3,), jnp.float32), x[0, :3])
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    ready, params, x = jnp.ones(2), jnp.ones(3), multiply(jnp.ones((700, 700)))
    state = tx.init(params)
    params, state = jax.block_until_ready(step(params, state, 0 * x))
    params, state = step(params, state, multiply(x))  # dispatched before its operands are ready
    if rank == 1:
        jax.block_until_ready(params)
    else:
        assert not params.is_ready()
    jdaso.broadcast(exchange, ready)
    jax.block_until_ready(params)
elif case.startswith("exchanges in other orders"):
    progress._DEADLOCK_SECONDS = 1.0
    names = ["", ""] if case.endswith("unnamed") else ["inner", "outer"]
    both = [jdaso.mpi_exchange(topology, name=name) for name in names]
    for each in reversed(both) if rank else both:
        jdaso.broadcast(each, jnp.ones(3))
elif case == "fewer steps":
    train(8 - 4 * rank, jdaso.constant(2))
elif case == "fewer steps, caught":
    try:
        train(8 - 4 * rank, jdaso.constant(2))
    except Exception:
        sys.exit(3)
elif case == "inside vmap":
    tx = jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, 2, 1))
    params = jnp.ones((3, 4))
    state = tx.init(jnp.ones(4))
    jax.vmap(lambda p: jdaso.apply_gradients(tx, p, state, p))(params)
elif case == "drift inside vmap":
    jax.vmap(lambda p: jdaso.drift(exchange, p))(jnp.ones((3, 4)))
elif case == "exception":
    train(8, jdaso.constant(2), between=lambda t: 1 / 0 if rank == 1 and t == 3 else None)
elif case == "exit in flight":
    train(3, jdaso.constant(2, 2))
elif case == "consensus beside a broadcast":
    progress._DEADLOCK_SECONDS = 1.0
    (jdaso.broadcast if rank else jdaso.drift)(exchange, jnp.ones(3))
elif case == "begun anew in flight":
    # An exchange is left behind, whose number the next training has, too.
    first, _, _ = train(7, jdaso.constant(2, 2))
    second, _, _ = train(7, jdaso.constant(2, 2))
    np.testing.assert_array_equal(first["kernel"], second["kernel"])
    assert list(exchange.posted()) == [2], exchange.posted().keys()
    first, _, _ = train(3, jdaso.constant(2, 2))
    second, _, _ = train(3, jdaso.constant(2, 2))
    np.testing.assert_array_equal(first["kernel"], second["kernel"])
    assert list(exchange.posted()) == [0], exchange.posted().keys()
elif case == "exit in flight alone":
    train(2 - rank, jdaso.constant(2, 2))
elif case == "stepped twice":
    params, state, step = train(2, jdaso.constant(3, 2))
    step(params, state)
    jax.block_until_ready(step(params, state))
elif case == "multi steps":
    # optax.MultiSteps steps the optimizer at every micro-batch and keeps one result of k.
    tx = optax.MultiSteps(jdaso.local_sgd(exchange, 1), every_k_schedule=2)
    params = jnp.ones(3)
    update = jax.jit(tx.update)
    state = tx.init(params)
    for _ in range(2):
        _, state = jax.block_until_ready(update(jnp.ones(3), state, params))
elif case == "stepped back":
    _, old, step = train(2, jdaso.constant(1))
    params, state, step = train(3, jdaso.constant(1))  # tx.init: numbers start anew
    step(params, old)
    jax.block_until_ready(step(params, old))
elif case == "restored in flight":
    params, state, step = train(3, jdaso.constant(3, 2))
    old = jax.tree.map(np.asarray, (params, state))
    for _ in range(2):
        params, state = step(params, state)
    jax.block_until_ready(params)
    params, state = old
    for _ in range(2):
        params, state = step(params, state)
    jax.block_until_ready(params)
elif case == "not finite, skip":
    # Rank 1 computes a gradient that is not finite: it is left out and takes the other's mean.
    params, state, _ = train(2, jdaso.constant(2), bad_step=rank - 1)
    np.testing.assert_allclose(params["kernel"], 1.0 - 2 * 0.1, rtol=1e-6)
    averaging = jdaso.core.averaging_state(state)
    assert (int(averaging.skipped), int(averaging.left_out)) == (rank, rank)
elif case == "mask":
    train(1, jdaso.constant(1), {"mask": jnp.array([0.0, -jnp.inf]), "w": jnp.ones(3)})
elif case == "compiled mask":
    # Where tx.init is traced, the first exchange finds it.
    tx, params = jdaso.local_sgd(exchange, 1), {"mask": jnp.array([0, -jnp.inf]), "w": jnp.ones(3)}
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    jax.block_until_ready(update(jax.tree.map(jnp.zeros_like, params), state, params))
elif case in ("in vain", "skipped together"):
    # All nodes skip steps, as loss scaling does; for gradients, this may take any number of steps.
    bad, params = {"w": jnp.full(3, jnp.nan)}, {"w": jnp.ones(3)}
    for tx, steps in (
        (jdaso.allreduce_gradients(exchange), 12),
        (jdaso.local_sgd(exchange, 1), 12 if case == "in vain" else 9),
    ):
        state, update = tx.init(params), jax.jit(tx.update)
        for _ in range(steps):
            _, state = jax.block_until_ready(update(bad, state, params))
        assert int(jdaso.metrics(state).left_out) == steps
        jax.block_until_ready(update(params, state, params))
elif case == "useless averages":
    said: list = []
    logging.getLogger("jdaso").addFilter(lambda record: said.append(record.getMessage()))

    def run(data, start=0, build=lambda: jdaso.daso(exchange, 2, 1), rate=0.1):
        said.clear()
        params = {"w": jnp.arange(3.0) + start}
        tx = jdaso.chain(optax.sgd(rate), build())
        state = tx.init(params)
        step = jax.jit(lambda p, s, g: jdaso.apply_gradients(tx, {"w": g}, s, p))
        for t in range(12):
            params, state = step(params, state, jnp.full(3, 1.0 + t * t + data))
        jax.block_until_ready(params)
        return [text for text in said if "parameters" in text]

    same, other = "all 2 nodes have sent the same parameters", "the parameters of rank 1 ("
    assert not run(data=rank)
    assert not run(data=rank, build=lambda: jdaso.local_sgd(exchange, 1))
    assert not run(data=rank, build=lambda: jdaso.daso(exchange, 1, 0))
    assert not run(data=0, rate=0.0)
    assert not run(data=0, build=lambda: jdaso.allreduce_gradients(exchange))
    builds = [
        lambda: jdaso.daso(exchange, 2, 1),
        lambda: jdaso.local_sgd(exchange, 1),
        lambda: jdaso.dasgd(exchange, 3, 2, wire="int8"),
        lambda: jdaso.easgd(exchange, 2),
        lambda: jdaso.diloco(exchange, 2, fragments=1),
    ]
    for build in builds:
        assert [same in text for text in run(data=0, build=build)] == [True] * (rank == 0)
    for build in builds[:2]:  # a forgotten broadcast
        assert [other in text for text in run(data=rank, start=rank, build=build)] == [True] * (
            rank == 0
        )
elif case == "not finite, raise":
    train(2, jdaso.constant(2), bad_step=rank - 1, nonfinite="raise")
elif not case.startswith(("thread level", "unequal devices", "uneven nodes", *STARTS)):
    raise SystemExit(f"no such case: {case}")
print("came to its end", flush=True)
