"""Local SGD against its recursion, and post-local SGD."""

import functools

import golden_family
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, few, random_run, simulate

import jdaso


@few(max_examples=3)
@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_follows_the_recursion(period, nodes, seed):
    x, grads = random_run(seed, 100, nodes)
    averaging = jdaso.local_sgd(jdaso.axis_exchange("node", nodes), period)
    params, state = simulate(averaging, x, grads, momentum=0.9)
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
