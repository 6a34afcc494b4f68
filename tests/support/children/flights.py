"""Checkpoints of several exchanges, of an earlier state, and restored into another program.

flights.py FOLDER CASE
"""

import sys

import jax
import numpy as np
from common import SGD, first_params, gradients, make_step, saved_leaves

import jdaso
from jdaso.checkpoint import Checkpoints
from jdaso.checkpoint import checkpoints as module

STEPS, SAVED_AT = 12, 6
folder, case = sys.argv[1:]
topology = jdaso.discover_topology()


def fresh(moments="local", fragments=1):
    """Two optimizers with exchanges of their own, of which the first has the shorter delay."""
    exchanges = [jdaso.mpi_exchange(topology) for _ in range(2)]
    schedules = [jdaso.constant(3, 2), jdaso.constant(5, 4)]
    wires = [None, "int8" if case == "other bits" else None]
    txs = [
        jdaso.chain(SGD, jdaso.daso(x, schedule=s, fragments=fragments, wire=wire), moments=moments)
        for x, s, wire in zip(exchanges, schedules, wires, strict=True)
    ]
    params = [first_params() for _ in txs]
    return exchanges, txs, (params, [tx.init(p) for tx, p in zip(txs, params, strict=True)])


def train(txs, state, steps):
    compiled = [jax.jit(make_step(tx)) for tx in txs]
    params, states = map(list, state)
    for t in steps:
        for i, step in enumerate(compiled):
            grads = gradients(params[i], topology.node, t + 100 * i)
            params[i], states[i] = step(params[i], states[i], grads, None)
    return jax.block_until_ready((params, states))


def in_flight(exchanges):
    return [len(exchange.posted()) for exchange in exchanges]


exchanges, txs, first = fresh()
half = train(txs, first, range(SAVED_AT))
assert in_flight(exchanges) == [1, 1], in_flight(exchanges)
if case == "one of two":
    Checkpoints(folder, topology, exchanges[0]).save(SAVED_AT, half)
checkpoints = Checkpoints(folder, topology, exchanges)
if case == "earlier state":
    train(txs, half, range(SAVED_AT, SAVED_AT + 3))
checkpoints.save(SAVED_AT, half)
now = train(txs, half, range(SAVED_AT, SAVED_AT + 2))
if case == "two":
    flights = in_flight(exchanges)
    seen = checkpoints.restore(now, resume=False)  # which leaves the running training alone
    assert (seen.step, in_flight(exchanges)) == (SAVED_AT, flights)
    for saved, found in zip(*map(jax.tree.leaves, (half[0], seen.state[0])), strict=True):
        np.testing.assert_array_equal(saved, found)
    for tx, state, p in zip(txs, seen.state[1], seen.state[0], strict=True):
        assert not jdaso.core.averaging_state(state).fragments[0].posted
        jdaso.drain(tx, state, p)
expected = train(txs, now, range(SAVED_AT + 2, STEPS))
checkpoints.close()

options = {"other moments": {"moments": "average"}, "other fragments": {"fragments": 2}}
exchanges, txs, like = fresh(**options.get(case, {}))
if case == "other order":
    exchanges.reverse()
if case == "other bits":
    read = module.read_part

    def altered(reader, path):
        part = read(reader, path)
        flights = {
            key: posted._replace(block_bits=(4,) * len(posted.leaves))
            for key, posted in part.in_flight.items()
        }
        return part._replace(in_flight=flights)

    module.read_part = altered
restored = Checkpoints(folder, topology, exchanges).restore(like)
found = train(txs, restored.state, range(SAVED_AT, STEPS))
for want, got in zip(*map(saved_leaves, (expected, found)), strict=True):
    np.testing.assert_array_equal(np.asarray(want), np.asarray(got))
