"""Workers of a center over MPI: against the simulation, against a replay, and without a worker."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import assert_close, first_params, gradients, make_step
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jdaso
from jdaso.center import init_cluster, take_turns

if sys.argv[1] == "devices":
    jdaso.cluster.use_virtual_devices(2)
topology = jdaso.discover_topology()
rank, workers = topology.rank, topology.num_nodes
SGD = optax.sgd(0.1, momentum=0.9)
PERIOD, STEPS = 3, 20
# NumPy and XLA round differently, by some 1e-7 at each of 60 exchanges.
TOLERANCE = 1e-5

# name -> a whole optimizer around a center
METHODS = {
    "easgd": lambda c, delay: jdaso.chain(
        SGD, jdaso.center.async_easgd(c, PERIOD, 0.3, delay=delay)
    ),
    "eamsgd": lambda c, delay: jdaso.center.async_eamsgd(c, PERIOD, 0.1, 0.9, 0.3, delay=delay),
    "downpour": lambda c, delay: jdaso.chain(SGD, jdaso.center.downpour(c, PERIOD, delay=delay)),
    "adownpour": lambda c, delay: jdaso.chain(SGD, jdaso.center.adownpour(c, PERIOD, delay=delay)),
    "mvadownpour": lambda c, delay: jdaso.chain(
        SGD, jdaso.center.mvadownpour(c, PERIOD, 0.01, delay=delay)
    ),
    "mdownpour": lambda c, delay: jdaso.center.mdownpour(c, 0.1, 0.9),
}


def train(tx, params, steps, between=lambda t: None, mapped=lambda step: step):
    """Steps of this worker in place; its gradients depend on rank and step."""
    state = tx.init(params)
    step = jax.jit(mapped(make_step(tx, in_place=hasattr(tx, "apply"))), donate_argnums=(0, 1))
    for t in range(steps):
        between(jax.block_until_ready((t, params))[0])
        params, state = step(params, state, gradients(params, rank, t), jnp.float32(0))
    return jax.block_until_ready((params, state))


def simulated(make, turns):
    """Cluster after the turns ``(worker, step)`` of a simulation."""
    tx = make(jdaso.center.simulated_center(workers))
    step = make_step(tx)

    def one(params, state, grads):
        return *step(params, state, grads, jnp.float32(0)), None

    params = first_params()
    grads = [gradients(params, worker, t) for worker, t in turns]
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *grads)
    order = np.array([worker for worker, _ in turns])
    cluster = init_cluster(tx, params, workers)
    return jax.jit(lambda c: take_turns(one, c, order, grads))(cluster)[0]


def lists(state):
    """The leaves of a state of a center, as numbers."""
    return jax.tree.leaves(state)


def refusal(function):
    """The error message of a call."""
    try:
        function()
    except Exception as error:
        return str(error)
    return "it was not refused"


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"the condition is still false after {seconds} s"
        time.sleep(0.01)


def alone():
    """One worker over MPI equals the simulation, and a written state can be read."""
    for name, delay in [("easgd", 2), ("eamsgd", 3), ("downpour", 0), ("adownpour", 3)]:
        alone_with(name, delay)
    alone_with("mvadownpour", 1)
    alone_with("mdownpour", 0)


def alone_with(name, delay):
    make = METHODS[name]
    center = jdaso.center.mpi_center(topology)
    tx = make(center, delay)
    params = center.join(first_params())
    params, state = train(tx, params, STEPS)
    cluster = simulated(lambda c: make(c, delay), [(0, t) for t in range(STEPS)])
    read = center.read(params)
    assert_close(params, jax.tree.map(lambda x: x[0], cluster.params), TOLERANCE)
    assert_close(lists(read), lists(cluster.center), TOLERANCE)
    assert int(read.clock) == int(cluster.center.clock) > 0
    center.write(read._replace(clock=100))
    again = center.read(params)
    assert [x.tobytes() for x in map(np.asarray, lists(again.center))] == [
        np.asarray(x).tobytes() for x in lists(read.center)
    ]
    assert int(again.clock) == 100
    grads = gradients(params, 0, 0)
    assert not jax.make_jaxpr(make_step(tx))(params, state, grads, jnp.float32(0)).effects


def devices():
    """A device may post the next exchange before the other one has taken the last reply."""

    def mapped(step):
        return jax.shard_map(step, mesh=topology.mesh, in_specs=P(), out_specs=P(), check_vma=False)

    for name in ("easgd", "downpour"):
        make, turns = METHODS[name], [(0, t) for t in range(STEPS)]
        center = jdaso.center.mpi_center(topology)
        tx = make(center, PERIOD)
        params = center.join(jax.device_put(first_params(), NamedSharding(topology.mesh, P())))
        params, _ = train(tx, params, STEPS, mapped=mapped)
        cluster = simulated(lambda c, make=make: make(c, PERIOD), turns)
        assert_close(params, jax.tree.map(lambda x: x[0], cluster.params), TOLERANCE)
        assert_close(lists(center.read(params)), lists(cluster.center), TOLERANCE)


def resumed():
    """All workers return to a saved center, in a new center and in the same one."""

    def go_on(center, tx, clock):
        assert_close(lists(center.read(first_params())), lists(saved), rtol=0)
        topology.comm.barrier()
        train(tx, center.join(first_params()), 6)
        topology.comm.barrier()
        assert int(center.read(first_params()).clock) == clock
        topology.comm.barrier()

    centers = [jdaso.center.mpi_center(topology) for _ in range(2)]
    (old, first), (new, second) = [(c, METHODS["adownpour"](c, 0)) for c in centers]
    train(first, old.join(first_params()), 6)
    topology.comm.barrier()
    saved = old.read(first_params())
    assert int(saved.clock) == 2 * workers
    topology.comm.barrier()
    go_on(old, first, 4 * workers)
    time.sleep(0.5 if rank == 0 else 0)  # the others wait for node 0
    params = new.join(first_params(), saved=saved if rank == 0 else None)
    assert_close(params, saved.center, rtol=0)
    go_on(new, second, 4 * workers)
    if rank == 0:
        old.join(params, saved=saved)
    topology.comm.barrier()
    go_on(old, first, 4 * workers)


def replay():
    """The center is the result of applying the rule to the messages in order of arrival."""
    for name, delay in [("easgd", 0), ("eamsgd", 2), ("adownpour", 1), ("mdownpour", 0)]:
        replay_with(name, delay)
        topology.comm.barrier()


def replay_with(name, delay):
    make, log = METHODS[name], []
    center = jdaso.center.mpi_center(topology, record=lambda w, message: log.append((w, message)))
    rules, make_exchange = [], center.make_exchange
    center.make_exchange = lambda rule: (rules.append(rule), make_exchange(rule))[1]
    tx = make(center, delay)
    params = center.join(first_params())
    train(tx, params, STEPS)
    if rank != 0:
        return
    first, period = {"mdownpour": (0, 1)}.get(name, (1 if "ea" in name else 0, PERIOD))
    exchanges = (STEPS - first) // period
    wait_until(lambda: sum(center.report()["workers"].values()) == workers * exchanges)
    read = center.read(params)
    state = rules[0].init([np.asarray(x) for x in jax.tree.leaves(first_params())])
    for _, message in log:
        state, _ = rules[0].update(state, message)
    ours, theirs = lists(read), lists(state)
    assert len(ours) == len(theirs)
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    # A JAX simulation in which each worker has taken as many steps as at its exchange.
    turns, done = [], [0] * workers
    for worker, _ in log:
        until = done[worker] + (period if done[worker] or not first else period + first)
        turns += [(worker, t) for t in range(done[worker], until)]
        done[worker] = until
    cluster = simulated(lambda c: make(c, delay), turns)
    assert_close(ours, lists(cluster.center), TOLERANCE)


def disturb_rank_2(disturb, gone_after=2.0):
    """Calls ``disturb`` on rank 2 at its tenth step; the others take all their steps."""
    center = jdaso.center.mpi_center(topology, gone_after=gone_after)
    # A worker that has received its reply has been counted.
    tx = METHODS["easgd"](center, 0)
    params = center.join(first_params())
    pids = topology.comm.allgather(os.getpid())

    def between(t):
        if rank == 2 and t == 10:
            disturb()

    train(tx, params, 30, between)
    return center, pids


def stopped():
    def stop():
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1)  # it sends a heartbeat before it ends

    center, pids = disturb_rank_2(stop)
    if rank != 0:
        return
    # Both others finish. Rank 2 does not continue; it may have stopped later than they finished.
    wait_until(lambda: center.report()["workers"] == {0: 9, 1: 9, 2: 3})
    wait_until(lambda: center.report()["gone"] == [2])
    time.sleep(3)  # 5 s in all, at least
    assert center.report()["workers"] == {0: 9, 1: 9, 2: 3}
    os.kill(pids[2], signal.SIGCONT)
    wait_until(lambda: center.report()["workers"][2] == 9)
    center.wait()
    assert center.report()["ended"] == [1, 2]
    assert 2 not in center.report()["gone"]


def killed():
    center, _ = disturb_rank_2(lambda: os.kill(os.getpid(), signal.SIGKILL))
    if rank == 0:
        wait_until(lambda: center.report()["gone"] == [2])
        assert center.report()["workers"][2] == 3
        wait_until(lambda: center.report()["ended"] == [1])


def killed_with_an_exchange():
    """The others cannot go on with the center, because an exchange needs rank 2."""
    exchange = jdaso.mpi_exchange(topology)
    disturb_rank_2(lambda: os.kill(os.getpid(), signal.SIGKILL))
    jdaso.consensus(exchange, first_params())


def failed():
    center, _ = disturb_rank_2(lambda: 1 / 0)
    if rank == 0:
        center.wait()
        report = center.report()
        assert (report["ended"], report["failed"], report["gone"]) == ([1], [2], [])
        assert report["workers"] == {0: 9, 1: 9, 2: 3}


def late():
    """Rank 2 joins after the others have updated the center, and starts from it."""
    center = jdaso.center.mpi_center(topology)
    tx = METHODS["downpour"](center, 0)
    params = first_params()
    if rank == 2:
        early = refusal(lambda: center.read(params))
        assert "there is no center yet" in early or "not refused" in early
        topology.comm.barrier()
        wait_until(lambda: int(center.read(params).clock) == 20)
        joined = center.join(params)
        assert_close(joined, center.read(params).center, rtol=0)
        assert np.abs(np.asarray(joined["float32"]["bias"] - params["float32"]["bias"])).max() > 0.1
        train(tx, joined, 6)
        assert int(center.read(params).clock) == 22
    else:
        params = center.join(params)
        topology.comm.barrier()
        train(tx, params, 30)


def refused():
    """A worker with another model or rule is refused, and the others continue."""
    center = jdaso.center.mpi_center(topology)
    alpha = 0.5 if rank == 2 else 0.3
    tx = optax.chain(SGD, jdaso.center.async_easgd(center, PERIOD, alpha))
    params = {"w": jnp.ones(3 + (rank == 1))}
    if rank == 0:
        train(tx, center.join(params), 20)
        assert center.report()["exchanges"] == 6
        return
    text = refusal(lambda: center.join(params))
    parts = {
        1: ["parameters differ: rank 0 ", "(3,), rank 1 ", "(4,)"],
        2: ["alpha=0.5", "alpha=0.3"],
    }
    assert all(part in text for part in parts[rank]), text
    # A worker that has not joined is refused at its first exchange.
    text = refusal(lambda: train(tx, params, PERIOD + 1))
    assert "rule or shapes are not those of the center" in text, text


CASES = (
    alone,
    devices,
    replay,
    resumed,
    stopped,
    killed,
    killed_with_an_exchange,
    failed,
    late,
    refused,
)
{case.__name__: case for case in CASES}[sys.argv[1]]()
print(f"rank {rank} came to its end", flush=True)
