"""Local SGD against its recursion, and post-local SGD."""

import functools

import golden_family
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, both_ways, few, random_run, simulate

import jdaso


@both_ways
@few(max_examples=2)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_follows_the_recursion(in_place, period, nodes, seed):
    x, grads = random_run(seed, 100, nodes)
    averaging = jdaso.local_sgd(jdaso.axis_exchange("node", nodes), period)
    params, state = simulate(averaging, x, grads, momentum=0.9, in_place=in_place)
    updates = golden_family.sgd(grads, LR, 0.9)
    expected = golden_family.dasgd(x, updates, period, delay=0, xi=0.0)
    assert_near(params, expected.params)  # the same float32 arithmetic as in test_daso.py
    assert not state.fragments[0].posted.any()
    assert (state.exchanges[-1] == 100 // period).all()


def test_post_local_sgd_is_a_mean_at_every_step_and_then_rare_ones():
    x, grads = random_run(1, 40, 3)
    schedule = jdaso.schedules.by_step(lambda step: (jnp.where(step < 16, 1, 8), 0))
    averaging = jdaso.local_sgd(jdaso.axis_exchange("node", 3), schedule=schedule)
    params, _ = simulate(averaging, x, grads)
    updates = golden_family.sgd(grads, LR)
    local_sgd = functools.partial(golden_family.dasgd, delay=0, xi=0.0)
    often = local_sgd(x, updates[:16], period=1).params
    rare = local_sgd(often[-1], updates[16:], period=8).params
    assert_near(params, np.concatenate([often, rare]))


def test_the_delta_rule_in_fragments():
    x, grads = random_run(3, 60, 3)
    exchange = jdaso.axis_exchange("node", 3)
    averaging = jdaso.local_sgd(exchange, 4, 3, "delta", fragments=2)
    params, _ = simulate(averaging, x, grads, leaves=6)
    updates = golden_family.sgd(grads, LR)
    expected = golden_family.in_fragments(golden_family.delta, x, updates, 4, 2, delay=3)
    assert_near(params, expected.params)


def test_the_delta_rule_keeps_a_nodes_own_rounding():
    """What travels is rounded, and the node keeps what it has not sent."""
    x, grads = random_run(4, 1, 1)
    exchange = jdaso.axis_exchange("node", 1)
    averaging = jdaso.local_sgd(exchange, 1, 0, "delta", wire="bfloat16")
    params, _ = simulate(averaging, x, grads)
    np.testing.assert_array_equal(params[0], (x + golden_family.sgd(grads, LR)[0]).astype("f4"))


@pytest.mark.parametrize(("wire", "added"), [(None, 0), ("bfloat16", 1 / 384), ("float16", 0)])
def test_the_delta_rule_adds_the_rounding_of_the_sum(wire, added):
    """Three nodes hold 129/128, which bfloat16 has. It does not have their sum."""
    averaging = jdaso.local_sgd(jdaso.axis_exchange("node", 3), 1, 0, "delta", wire=wire)
    x = np.full((3, 1), 129 / 128)
    params, _ = simulate(averaging, x, np.zeros((1, 3, 1)))
    np.testing.assert_allclose(params[0] - x, added, atol=1e-7)
