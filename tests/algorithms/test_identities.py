"""Algorithms that coincide for special values of their arguments."""

import jax
import numpy as np
import optax
import pytest
from virtual_nodes import LR, assert_near, engine_state, random_run, simulate, train

import jdaso

NODES = 3
NODE_AXIS = jdaso.axis_exchange("node", NODES)


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_dasgd_without_delay_and_own_weight_is_local_sgd():
    x, grads = random_run(0, 60, NODES)
    dasgd = simulate(jdaso.dasgd(NODE_AXIS, period=4, delay=0, xi=0.0), x, grads, momentum=0.9)
    local_sgd = simulate(jdaso.local_sgd(NODE_AXIS, period=4), x, grads, momentum=0.9)
    assert_same(dasgd, local_sgd)


def test_local_sgd_with_a_mean_at_every_step_is_minibatch_sgd():
    def gradient(x, noise):  # of a bounded loss, not quadratic, for NumPy and JAX
        return x / (1 + x * x) - noise

    x, noise = random_run(1, 100, NODES, alike=True)
    averaging = jdaso.local_sgd(NODE_AXIS, period=1)
    params, _ = simulate(averaging, x, noise, gradient=gradient)
    joint, minibatch = x[0], []
    for step in noise:
        joint = joint - LR * gradient(joint, step).mean(axis=0)  # over the joint batch
        minibatch.append(np.broadcast_to(joint, x.shape))
    assert_near(params, np.array(minibatch))  # the same float32 arithmetic as in test_daso.py


def test_diloco_whose_outer_step_goes_all_the_way_is_local_sgd():
    x, grads = random_run(2, 100, NODES, alike=True)
    averaging = jdaso.diloco(NODE_AXIS, period=4, outer=optax.sgd(1.0))
    diloco, _ = simulate(averaging, x, grads)
    local_sgd, _ = simulate(jdaso.local_sgd(NODE_AXIS, period=4), x, grads)
    # a - (a - mean) is the mean up to two roundings. 25 of them, of either sign, are about as many
    # as in a comparison with NumPy.
    assert_near(diloco, local_sgd)


def test_eamsgd_without_momentum_is_easgd_with_sgd():
    x, noise = random_run(3, 60, NODES, alike=True)

    def look(state, params):
        return jdaso.easgd_center(state), engine_state(state, params)

    def gradient(x, noise):
        return x - noise

    run = {"gradient": gradient, "look": look}
    eamsgd = train(jdaso.eamsgd(NODE_AXIS, 4, LR, momentum=0.0), x, noise, **run)
    easgd = simulate(jdaso.easgd(NODE_AXIS, 4), x, noise, **run)
    # Bit for bit: products by 0, 1 and the learning rate, a power of 2, are exact.
    assert_same(eamsgd, easgd)


def test_daso_in_a_blocking_phase_is_a_mean_at_every_step():
    x, grads = random_run(4, 60, NODES)
    schedule = jdaso.cycling(period=4, warmup=30, cooldown=30, total=60)
    averaging = jdaso.daso(NODE_AXIS, schedule=schedule, blocking_wire="float32")
    daso, state = simulate(averaging, x, grads)
    local_sgd, _ = simulate(jdaso.local_sgd(NODE_AXIS, period=1), x, grads)
    assert state.plan.blocking.all()
    # The programs differ, so XLA fuses the products that make a mean of a sum in different ways.
    assert_near(daso, local_sgd)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("delay", [0, 2])
def test_easgd_gives_the_same_whenever_its_sum_arrives(delay):
    x, grads = random_run(5, 60, NODES, alike=True)

    def run(averaging):
        def look(state, params):
            return jdaso.easgd_center(jdaso.drain(averaging, state, params)[1])

        return simulate(averaging, x, grads, momentum=0.9, look=look)

    delayed = run(jdaso.easgd(NODE_AXIS, period=4, alpha=0.1))
    early = run(jdaso.easgd(NODE_AXIS, alpha=0.1, schedule=jdaso.constant(4, delay)))
    assert_same(delayed, early)


def test_the_mean_of_gradients_gives_the_mean_of_parameters():
    x, grads = random_run(6, 100, NODES, alike=True)
    tx = optax.chain(jdaso.allreduce_gradients(NODE_AXIS, wire="float32"), optax.sgd(LR))
    of_gradients, _ = train(tx, x, grads)
    of_parameters, _ = simulate(jdaso.local_sgd(NODE_AXIS, period=1), x, grads)
    # mean(x - lr g) and x - lr mean(g) differ by one or two roundings in each of 100 steps.
    assert_near(of_gradients, of_parameters)
