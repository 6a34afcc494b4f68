"""DaSGD against the recursion of dasgd Eq. 2."""

import golden_family
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, both_ways, dyadic_run, few, random_run, simulate

import jdaso

SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def rules(draw, least_period=1):
    """Valid periods, delays and xi."""
    period = draw(st.integers(least_period, 6))
    delay = draw(st.integers(0, period))
    weights = [0.0, 0.25, 0.7]
    return period, delay, draw(st.sampled_from(weights))


@both_ways
@few(max_examples=3)
@given(rules(), st.integers(1, 6), st.sampled_from([0.0, 0.9]), SEEDS)
def test_follows_the_recursion(in_place, rule, nodes, momentum, seed):
    x, grads = random_run(seed, 100, nodes)
    averaging = jdaso.dasgd(jdaso.axis_exchange("node", nodes), *rule)
    params, state = simulate(averaging, x, grads, momentum=momentum, in_place=in_place)
    expected = golden_family.dasgd(x, golden_family.sgd(grads, LR, momentum), *rule)
    assert_near(params, expected.params)  # the same float32 arithmetic as in test_daso.py
    assert (state.plan.period == rule[0]).all()
    assert (state.plan.delay == rule[1]).all()


@both_ways
@few(max_examples=2)
@given(rules(least_period=3), st.integers(2, 3), st.integers(2, 4), SEEDS)
def test_fragments_take_turns_and_each_follows_the_recursion(
    in_place, rule, fragments, nodes, seed
):
    x, grads = random_run(seed, 100, nodes)
    averaging = jdaso.dasgd(jdaso.axis_exchange("node", nodes), *rule, fragments=fragments)
    params, state = simulate(averaging, x, grads, leaves=6, in_place=in_place)
    period, delay, xi = rule
    expected = golden_family.in_fragments(
        golden_family.dasgd, x, golden_family.sgd(grads, LR), period, fragments, delay=delay, xi=xi
    )
    assert_near(params, expected.params)
    assert len(state.fragments) == fragments


@both_ways
@few(max_examples=2)
@given(
    delay=st.integers(0, 4),
    nodes=st.integers(2, 5),
    node=st.integers(0, 1),
    step=st.sampled_from([0, 11, 12, 13, 14, 15]),  # an exchange is posted after steps 11, 15
    seed=SEEDS,
)
def test_a_node_that_is_not_finite_takes_the_mean_of_the_others(
    in_place, delay, nodes, node, step, seed
):
    x, grads = random_run(seed, 40, nodes)
    grads[step, node, 1] = np.inf
    averaging = jdaso.dasgd(jdaso.axis_exchange("node", nodes), 4, delay, xi=0.3)
    params, state = simulate(averaging, x, grads, in_place=in_place)
    expected = golden_family.dasgd(x, golden_family.sgd(grads, LR), 4, delay, xi=0.3)
    assert_near(params, expected.params)
    np.testing.assert_array_equal(state.left_out[-1], expected.left_out)
    assert state.skipped[-1].sum() == state.skipped[-1][node] == 1


@pytest.mark.parametrize("xi", [0.0, 1.0])
def test_xi_is_the_weight_of_a_node_itself(xi):
    x, grads = random_run(0, 4, 3)
    averaging = jdaso.dasgd(jdaso.axis_exchange("node", 3), period=3, delay=1, xi=xi)
    params, _ = simulate(averaging, x, grads)
    alone = x + golden_family.sgd(grads, LR).cumsum(axis=0)
    late = np.broadcast_to(alone[2].mean(axis=0), x.shape)
    # The tolerance covers four roundings of numbers below 4.
    np.testing.assert_allclose(params[3], alone[3] if xi else late, atol=4 * 2.0**-23)


@pytest.mark.parametrize("delay", [0, 2, 4])
def test_where_nobody_contributes_nothing_changes_but_counts(delay):
    """All nodes fail in step 3, after which an exchange is due.

    With a delay of the whole period, they post again before they know that nobody contributed.
    """
    x, grads = dyadic_run(16, 3)
    late = delay == 4
    grads[3] = np.nan
    averaging = jdaso.dasgd(jdaso.axis_exchange("node", 3), 4, delay)
    params, state = simulate(averaging, x, grads)
    alone = x + golden_family.sgd(np.nan_to_num(grads), LR).cumsum(axis=0)
    sent = 11 if late else 7
    np.testing.assert_array_equal(params[: sent + delay], alone[: sent + delay])  # exact
    # All nodes contribute to the next mean.
    merged = 0.25 * alone[sent + delay] + 0.75 * alone[sent].mean(axis=0)
    np.testing.assert_allclose(params[sent + delay], merged, rtol=1e-6)
    assert (state.skipped[-1] == 1).all()
    assert (state.left_out[-1] == 1 + late).all()
    assert (state.exchanges[-1] == 4).all()
