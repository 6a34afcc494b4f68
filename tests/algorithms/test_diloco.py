"""DiLoCo against its recursion with an explicit outer Nesterov SGD."""

import functools

import golden_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, both_ways, few, random_run, simulate

import jdaso

SEEDS = st.integers(0, 2**32 - 1)
NESTEROV = {"lr": 0.7, "momentum": 0.9}  # the default of the library, and of the paper
# The outer optimizer amplifies each rounding error of a mean by lr / (1 - momentum) = 7, and these
# errors accumulate in the anchor. In 100 steps NumPy's float32 deviates by up to 6e-6 of the norm.
STRAYS = 1e-5


def anchors(state, params):
    """The anchor of all fragments."""
    return jnp.concatenate(jax.tree.leaves(jdaso.diloco_anchor(state, params)))


def assert_follows(result, expected):
    params, anchor = result
    assert (anchor == anchor[:, :1]).all()  # the same on all nodes
    assert_near(params, expected.params, STRAYS)
    assert_near(anchor[:, 0], expected.common, STRAYS)


@st.composite
def rules(draw, least_period=1):
    """Valid periods, delays and mixes of the papers' algorithm, which has no warm-up."""
    period = draw(st.integers(least_period, 6))
    delay = draw(st.integers(0, period))
    mixes = [0.0, 0.25, 0.6]
    mix = draw(st.sampled_from(mixes))
    return {"period": period, "delay": delay, "mix": mix, "warmup": 0}


@both_ways
@few(max_examples=3)
@given(rules(), st.integers(1, 6), st.sampled_from([0.0, 0.9]), SEEDS)
def test_follows_the_recursion(in_place, rule, nodes, momentum, seed):
    x, grads = random_run(seed, 100, nodes, alike=True)
    averaging = jdaso.diloco(jdaso.axis_exchange("node", nodes), **rule)
    result = simulate(averaging, x, grads, momentum=momentum, look=anchors, in_place=in_place)
    updates = golden_family.sgd(grads, LR, momentum)
    assert_follows(result, golden_family.diloco(x, updates, **rule, **NESTEROV))


LATE = {"period": 4, "delay": 3, "mix": 0.25, "warmup": 0}


@both_ways
@few(max_examples=1)
@given(rules(least_period=3), st.integers(2, 3), st.integers(2, 4), SEEDS)
@example(LATE, 2, 3, 0)
def test_fragments_take_turns_and_each_has_its_own_anchor(in_place, rule, fragments, nodes, seed):
    x, grads = random_run(seed, 100, nodes, alike=True)
    averaging = jdaso.diloco(jdaso.axis_exchange("node", nodes), **rule, fragments=fragments)
    result = simulate(averaging, x, grads, look=anchors, leaves=6, in_place=in_place)
    expected = golden_family.in_fragments(
        golden_family.diloco,
        x,
        golden_family.sgd(grads, LR),
        fragments=fragments,
        **rule,
        **NESTEROV,
    )
    assert_follows(result, expected)


@both_ways
@few(max_examples=1)
@given(rules(least_period=2), st.integers(1, 9), SEEDS)
@example(LATE, 3, 0)
def test_the_outer_optimizer_begins_after_the_warmup(in_place, rule, warmup, seed):
    x, grads = random_run(seed, 60, 3, alike=True)
    rule = rule | {"warmup": warmup, "fragments": 2}
    averaging = jdaso.diloco(jdaso.axis_exchange("node", 3), **rule)
    result = simulate(averaging, x, grads, look=anchors, leaves=2, in_place=in_place)
    updates = golden_family.sgd(grads, LR)
    expected = golden_family.in_fragments(golden_family.diloco, x, updates, **rule, **NESTEROV)
    assert_follows(result, expected)


def test_the_default_is_the_papers_algorithm_which_has_no_warmup():
    x, grads = random_run(2, 14, 2, alike=True)
    averaging = jdaso.diloco(jdaso.axis_exchange("node", 2), period=1)
    result = simulate(averaging, x, grads, look=anchors)
    updates = golden_family.sgd(grads, LR)
    assert_follows(result, golden_family.diloco(x, updates, 1, **NESTEROV, warmup=0))


def test_a_warmup_needs_no_memory():
    """It selects between numbers that the outer optimizer computes anyway."""
    params = [jnp.ones((64, 64))] * 4

    def temporary(warmup):
        averaging = jdaso.diloco(jdaso.single_exchange(), 4, delay=2, mix=0.5, warmup=warmup)
        tx = jdaso.chain(optax.sgd(LR), averaging)
        step = jax.jit(functools.partial(jdaso.apply_gradients, tx), donate_argnums=(1, 2))
        compiled = step.lower(params, tx.init(params), params).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    leaf = params[0].nbytes
    assert temporary(10) < temporary(0) + leaf / 4


def test_a_function_chooses_the_fragments():
    """Leaves 0, 2 and 4 are in fragment 0: the same as fragments of the reordered leaves."""
    x, grads = random_run(0, 20, 2, size=60, alike=True)
    exchange = jdaso.axis_exchange("node", 2)
    columns = np.arange(60).reshape(6, 10)[[0, 2, 4, 1, 3, 5]].ravel()
    strided = jdaso.diloco(exchange, 4, delay=2, fragments=lambda path: path[0].idx % 2, warmup=1)
    found = simulate(strided, x, grads, look=anchors, leaves=6)
    parts = jdaso.diloco(exchange, 4, delay=2, fragments=2, warmup=1)
    expected = simulate(parts, x[:, columns], grads[:, :, columns], look=anchors, leaves=6)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine[..., columns], theirs)


def test_a_state_without_an_anchor_is_refused():
    params, tx = {"w": jnp.ones(2)}, jdaso.dasgd(jdaso.single_exchange(), 4, 2)
    with pytest.raises(ValueError, match="no anchor"):
        jdaso.diloco_anchor(tx.init(params), params)


def test_a_node_that_is_not_finite_follows_the_anchor_of_the_others():
    x, grads = random_run(0, 40, 3, alike=True)
    grads[14, 1, 0] = np.nan  # posted after step 15, merged after step 17
    averaging = jdaso.diloco(jdaso.axis_exchange("node", 3), 4, delay=2, mix=0.25)
    result = simulate(averaging, x, grads, look=anchors)
    updates = golden_family.sgd(grads, LR)
    expected = golden_family.diloco(x, updates, 4, **NESTEROV, delay=2, mix=0.25)
    assert expected.left_out.tolist() == [0, 1, 0]
    assert_follows(result, expected)


def test_the_outer_optimizer_may_be_any():
    x, grads = random_run(1, 8, 2, size=8, alike=True)
    averaging = jdaso.diloco(jdaso.axis_exchange("node", 2), 8, optax.adam(0.5))
    params, _ = simulate(averaging, x, grads)
    # Adam's first step is its learning rate, in the direction of the outer gradient's sign.
    mean = (x + golden_family.sgd(grads, LR).sum(axis=0)).mean(axis=0)
    expected = x[0] - 0.5 * np.sign(x[0] - mean)
    assert np.abs(x[0] - mean).min() > 1e-3  # far above Adam's epsilon of 1e-8
    np.testing.assert_allclose(params[-1], np.tile(expected, (2, 1)), atol=2e-5)
