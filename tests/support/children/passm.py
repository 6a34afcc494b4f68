"""Processes train one model in shared memory; or one thing goes wrong between them."""

import sys
import time
from pathlib import Path

import compile_in_turn  # noqa: F401
import jax
import numpy as np
from oversleep import oversleep

import jdaso
from jdaso import passm

sys.path.insert(0, str(Path(__file__).parents[1]))
from passm_problem import batch, first_params, flat, loss_fn

case = sys.argv[1]
topology = jdaso.discover_topology()
rank, size, comm = topology.rank, len(topology.processes), topology.comm
METHODS = {
    "assm": (passm.assm, {}),
    "passm": (passm.passm, {}),
    "passm_plus": (passm.passm_plus, {"switches": [2, 4]}),
}


def in_turn(name, data=batch, steps=6, servers=size, **options):
    """The shared parameters after steps in turn, with the states of this process."""
    params = first_params()
    method, more = METHODS[name]
    memory = passm.shared_memory(topology, params, servers)
    blocks = passm.partition(params, servers)
    training = method(memory, blocks, loss_fn, 0.2, 0.8, **more, **options)
    state = training.init()
    for k in range(steps):
        for turn in range(servers):
            if turn == memory.process:
                state, _ = training.step(state, *data(rank, k))
            comm.Barrier()
    return flat(passm.settled(memory))


def simulated(name, batches, steps=6):
    """The same with one process that plays the servers."""
    params, servers = first_params(), len(batches(0))
    method, more = METHODS[name]
    memories = passm.simulated_memory(params, servers)
    blocks = passm.partition(params, servers)
    trainings = [method(memory, blocks, loss_fn, 0.2, 0.8, **more) for memory in memories]
    states = [training.init() for training in trainings]
    for k in range(steps):
        for c, data in enumerate(batches(k)):
            states[c], _ = trainings[c].step(states[c], *data)
    return flat(memories[0].read())


def no_update_is_lost():
    memory = passm.shared_memory(topology, {"w": np.full(300, 5.0, "f4")})
    for _ in range(1000):
        memory.add({0: {0: np.ones(300, "f4")}}, True)
    np.testing.assert_array_equal(passm.settled(memory)["w"], np.full(300, 5.0 + 1000 * size))


def no_step_of_assm_is_lost():
    """All write the same place at once; the gradient is 1, and sums of 2^-6 are exact."""
    params = {f"layer {i}": np.zeros(300, "f4") for i in range(size)}
    memory = passm.shared_memory(topology, params)
    blocks = passm.partition(params, size)

    def loss_fn(params):
        return sum(x.sum() for x in params.values())

    training = passm.assm(memory, blocks, loss_fn, 2**-6, momentum=0.0)
    state = training.init()
    for _ in range(500):
        state, _ = training.step(state)
    for leaf in passm.settled(memory).values():
        np.testing.assert_array_equal(leaf, -500 * size * 2**-6)


def every_number_is_one_that_was_written():
    """All bytes of the two numbers differ, so a mixture would be a third one."""
    number = np.float32(1.2345678e-5)
    memory = passm.shared_memory(topology, {"w": np.zeros(1001, "f4")})
    for i in range(1000):
        if rank == 0:
            memory.add({0: {0: np.full(1001, number if i % 2 == 0 else -number)}}, False)
        else:
            assert np.isin(memory.read()["w"], [0, number]).all()
    memory.barrier()


def servers_with_slaves():
    """The mean over a server's group is the gradient of their batches together.

    A server computes at 2 rows and its slave at 8, as passm Fig. 4 does at 32 and 128.
    """
    servers = size // 2
    group = jdaso.mpi_exchange(passm.server_group(topology, servers))

    def own(process, k):
        rows = 2 if process < servers else 8
        return [x[:rows] for x in batch(process, k)]

    result = in_turn(
        "passm_plus", own, servers=servers, group=group, batch_size=len(own(rank, 0)[0])
    )

    def together(k):
        pairs = [(own(c, k), own(c + servers, k)) for c in range(servers)]
        return [
            tuple(np.concatenate(arrays) for arrays in zip(*pair, strict=True)) for pair in pairs
        ]

    np.testing.assert_allclose(result, simulated("passm_plus", together), rtol=0, atol=1e-5)


def learns():
    """Nobody waits for anybody: least squares that all share, each row in somebody's batch."""
    rng = np.random.default_rng(0)
    solution = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), first_params())
    n = len(flat(solution))
    a = rng.normal(size=(64, n)).astype("f4")
    b = a @ flat(solution).astype("f4")

    def loss_fn(params, a, b):
        x = jax.numpy.concatenate([jax.numpy.ravel(leaf) for leaf in jax.tree.leaves(params)])
        return ((a @ x - b) ** 2).mean() / 2

    for name, (method, more) in METHODS.items():
        params = jax.tree.map(np.zeros_like, solution)
        memory = passm.shared_memory(topology, params)
        blocks = passm.partition(params, size)
        training = method(memory, blocks, loss_fn, 0.1, 0.5, **more)
        state = training.init(a[:16], b[:16])
        for epoch in range(1000):
            if epoch % 50 == 0:  # on a machine with fewer cores than processes
                memory.barrier()
            for rows in passm.minibatches(64, [16] * size, epoch)[rank]:
                state, _ = training.step(state, a[rows], b[rows])
        error = np.abs(flat(passm.settled(memory)) - flat(solution)).max()
        assert error < 1e-3, (name, error)


if case == "works":
    every_number_is_one_that_was_written()
    for name in METHODS:
        alone = simulated(name, lambda k: [batch(c, k) for c in range(size)])
        np.testing.assert_array_equal(in_turn(name), alone)
    learns()
elif case == "servers":
    no_update_is_lost()
    no_step_of_assm_is_lost()
    servers_with_slaves()
elif case == "a group waits":
    # Rank 3 closes the exchange of ranks 1 and 3; ranks 0 and 2 have posted no more than it has.
    exchange = jdaso.mpi_exchange(passm.server_group(topology, 2), timeout=60)
    ones = {"w": np.ones(3, "f4")}
    jdaso.consensus(exchange, ones)
    if rank == 1:
        try:
            jdaso.consensus(exchange, ones)
        except jdaso.JdasoError as error:
            print(f"rank 1: {error}", flush=True)
    elif rank % 2 == 0:
        time.sleep(5)
    exchange.close()
elif case == "ends early":
    memory = passm.shared_memory(topology, first_params())
    if rank == 0:
        memory.barrier()
elif case == "late":
    memory = passm.shared_memory(topology, first_params(), timeout=1.0)
    if rank == 1:
        oversleep()
    memory.barrier()
elif case == "other parameters":
    passm.shared_memory(topology, {"w": np.zeros(3 + rank)})
elif case == "no space":
    passm.shared_memory(topology, {"w": np.broadcast_to(np.float32(0), (2**38,))})  # a terabyte
elif case == "other blocks":
    params = first_params()
    memory = passm.shared_memory(topology, params)
    blocks = [(0, 1), (2, 3, 4)] if rank else [(0, 1, 2), (3, 4)]
    passm.passm(memory, blocks, loss_fn, 0.1)
else:
    raise SystemExit(f"no such case: {case}")
print("came to its end", flush=True)
