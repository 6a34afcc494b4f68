"""Merges that discard nothing: the corrections of all nodes sum to zero."""

import golden_family
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, both_ways, few, random_run, simulate

import jdaso

XI = 0.25
# An algorithm with ``merge="delta"``, and the weight of its correction.
CORRECTIONS = {
    "daso": (
        lambda x, k, d, **more: jdaso.daso(x, k, d, blocking_wire="float32", merge="delta", **more),
        lambda members, age: members / (2 * age + members),
    ),
    "dasgd": (
        lambda x, k, d, **more: jdaso.dasgd(x, k, d, XI, merge="delta", **more),
        lambda members, age: 1 - XI,
    ),
    "local_sgd": (
        lambda x, k, d, **more: jdaso.local_sgd(x, k, d, "delta", **more),
        lambda members, age: 1.0,
    ),
}
each = pytest.mark.parametrize("name", CORRECTIONS)


@each
@both_ways
@few(max_examples=3)
@given(st.integers(1, 5), st.integers(0, 5), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_it_follows_its_recursion_and_the_mean_follows_the_steps(
    name, in_place, period, delay, nodes, seed
):
    (make, weight), delay = CORRECTIONS[name], min(period, delay)
    x, grads = random_run(seed, 40, nodes)
    averaging = make(jdaso.axis_exchange("node", nodes), period, delay)
    params, _ = simulate(averaging, x, grads, momentum=0.9, in_place=in_place)
    updates = golden_family.sgd(grads, LR, 0.9)
    assert_near(params, golden_family.delta(x, updates, period, delay, weight=weight).params)
    means = x.mean(axis=0) + updates.mean(axis=1).cumsum(axis=0)
    assert_near(params.mean(axis=1), means)


@each
@pytest.mark.parametrize("step", [10, 11, 12, 15])  # an exchange is posted after 11, 15
@pytest.mark.parametrize("delay", [0, 2, 4])
def test_a_node_that_is_left_out_takes_the_mean(name, step, delay):
    make, weight = CORRECTIONS[name]
    x, grads = random_run(2, 30, 3)
    grads[step, 1, 5] = np.inf
    params, state = simulate(make(jdaso.axis_exchange("node", 3), 4, delay), x, grads)
    updates = golden_family.sgd(grads, LR)
    expected = golden_family.delta(x, updates, 4, delay, weight=weight)
    assert_near(params, expected.params)
    np.testing.assert_array_equal(state.left_out[-1], expected.left_out)


@each
@pytest.mark.parametrize(("wire", "error"), [("int8", 1 / 256), ("float4", 1 / 16)])
def test_what_the_others_have_decoded_is_subtracted(name, wire, error):
    """The mean then follows the steps, up to the rounding of sums, which residuals keep."""
    make = CORRECTIONS[name][0]
    x, grads = random_run(5, 200, 3)
    exact, _ = simulate(make(jdaso.axis_exchange("node", 3), 4, 3), x, grads)
    params, _ = simulate(make(jdaso.axis_exchange("node", 3), 4, 3, wire=wire), x, grads)
    path = np.linalg.norm(exact - x, axis=(1, 2)).max()
    assert np.linalg.norm(params - exact, axis=(1, 2)).max() < error * path
    means = x.mean(axis=0) - LR * grads.mean(axis=1).cumsum(axis=0)
    assert np.linalg.norm(params.mean(axis=1) - means, axis=1).max() < error * path


@each
@pytest.mark.parametrize("wire", ["int8", "float4"])
def test_a_node_that_is_left_out_takes_the_mean_on_narrow_wires(name, wire):
    x, grads = random_run(2, 30, 3)
    grads[11, 1, 5] = np.inf  # the exchange after step 12 lacks node 1
    averaging = CORRECTIONS[name][0](jdaso.axis_exchange("node", 3), 4, 2, wire=wire)

    def anchor(state, params):
        return jdaso.core.averaging_state(state).fragments[0].feedback.anchor[0]

    params, anchors = simulate(averaging, x, grads, look=anchor)
    assert np.isfinite(params).all()
    np.testing.assert_array_equal(anchors, np.broadcast_to(anchors[:, :1], anchors.shape))
    np.testing.assert_allclose(params[13, 1], anchors[13, 1], rtol=0, atol=1e-6)
    assert np.abs(params[13, 0] - anchors[13, 0]).max() > 1e-3


@each
def test_a_checkpoint_tells_it_from_the_mean(name):
    exchange, params = jdaso.single_exchange(), jnp.ones(3)
    correction = CORRECTIONS[name][0](exchange, 4, 2)
    mean = {
        "daso": lambda: jdaso.daso(exchange, 4, 2),
        "dasgd": lambda: jdaso.dasgd(exchange, 4, 2),
        "local_sgd": lambda: jdaso.local_sgd(exchange, 4, 2),
    }[name]()
    trees = (jax.tree.structure(averaging.init(params)) for averaging in (correction, mean))
    assert len({*trees}) == 2
