"""EASGD against a blocking recursion of easgd Eq. 5 and 6. The delay is a whole period."""

import golden
import golden_family
import jax
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import (
    LR,
    assert_near,
    both_ways,
    dyadic_run,
    engine_state,
    few,
    random_run,
    simulate,
)

import jdaso

SEEDS = st.integers(0, 2**32 - 1)


def looking(averaging):
    """The center, the center with the exchange in flight, and the engine's state."""

    def look(state, params):
        _, drained = jdaso.drain(averaging, state, params)
        centers = [jdaso.easgd_center(s)[0] for s in (state, drained)]
        return *centers, engine_state(state, params)

    return look


def run(averaging, x, grads, momentum=None, losses=None, in_place=False):
    # jdaso.drain takes what the state belongs to. Its optimizer does not matter.
    drained = jdaso.chain(optax.identity(), averaging) if in_place else averaging
    params, (center, drained, state) = simulate(
        averaging, x, grads, losses, momentum, look=looking(drained), in_place=in_place
    )
    for tree in (center, drained):  # the same on all nodes
        assert (tree == tree[:, :1]).all()
    return params, center[:, 0], drained[:, 0], state


@both_ways
@few(max_examples=3)
@given(
    period=st.integers(1, 6),
    nodes=st.integers(1, 6),
    beta=st.sampled_from([0.3, 0.9]),
    momentum=st.sampled_from([0.0, 0.9]),
    seed=SEEDS,
)
def test_a_delay_of_a_whole_period_changes_no_number(in_place, period, nodes, beta, momentum, seed):
    x, grads = random_run(seed, 100, nodes, alike=True)
    averaging = jdaso.easgd(jdaso.axis_exchange("node", nodes), period, alpha=beta / nodes)
    params, center, drained, state = run(averaging, x, grads, momentum, in_place=in_place)
    updates = golden_family.sgd(grads, LR, momentum)
    expected = golden_family.easgd(x, updates, period, alpha=beta / nodes)
    # The same float32 arithmetic as in test_daso.py.
    assert_near(params, expected.params)
    # An exchange posted before step t is in flight until the next communication step.
    assert state.fragments[0].posted[period:].all()
    assert_near(drained, expected.common)
    assert_near(center[period:], expected.common[np.arange(100) // period * period - 1][period:])


@both_ways
@few(max_examples=2)
@given(st.integers(0, 3), st.integers(2, 6), SEEDS)
def test_a_schedule_changes_when_the_sum_arrives_and_no_number(in_place, delay, nodes, seed):
    x, grads = random_run(seed, 100, nodes, alike=True)
    schedule = jdaso.constant(3, delay)
    averaging = jdaso.easgd(jdaso.axis_exchange("node", nodes), alpha=0.1, schedule=schedule)
    params, _, drained, _ = run(averaging, x, grads, in_place=in_place)
    expected = golden_family.easgd(x, golden_family.sgd(grads, LR), 3, alpha=0.1)
    assert_near(params, expected.params)
    assert_near(drained, expected.common)


def blocking(x, updates, losses, schedule, alpha):
    """Eq. 5 and 6 before the update of step t + 1, if an exchange is due after step t."""
    c, cycle, epoch_losses, params, centers = x[0], golden.Cycle(schedule), [], [], []
    for t, update in enumerate(updates):
        phase, start, _ = schedule.phase(t - 1)
        period = cycle.period if phase == golden.CYCLING else 1
        if t > 0 and ((t - start) % period == 0 or schedule.epoch_ends(t - 1)):
            x, c = x - alpha * (x - c), c + alpha * (x - c).sum(axis=0)
        if t > 0 and schedule.epoch_ends(t - 1):
            if phase == golden.CYCLING:
                cycle.epoch_loss(np.mean(epoch_losses))
            epoch_losses = []
        epoch_losses.append(losses[t])
        x = x + update
        params.append(x)
        centers.append(c)
    return np.array(params), np.array(centers)


@few(max_examples=2)
@given(st.integers(2, 5), SEEDS)
def test_cycling_is_the_blocking_algorithm_whatever_the_delay(nodes, seed):
    """Through warm-up, plateaus, ends of epochs within a period, and cool-down."""
    x, grads = random_run(seed, 70, nodes, alike=True)
    losses = np.random.default_rng(seed).choice([1.0, 2.0], (70, nodes))
    exchange, results = jdaso.axis_exchange("node", nodes), []
    for delay in (0, 1, 4):
        phases = golden.Schedule(4, delay, warmup=6, cooldown=5, total=70, epoch=7, patience=0)
        averaging = jdaso.easgd(exchange, alpha=0.1, schedule=jdaso.cycling(**vars(phases)))
        results.append(run(averaging, x, grads, losses=losses))
        params, _, drained, state = results[-1]
        updates = golden_family.sgd(grads, LR)
        expected, centers = blocking(x, updates, losses, phases, alpha=0.1)
        assert_near(params, expected)
        assert_near(drained, centers)
        assert {1, 2, 4} <= set(state.plan.period[7:65].ravel().tolist())
    # Each delay is a program of its own, in which XLA may contract other products and sums.
    for params, _, drained, _ in results[1:]:
        assert_near(params, results[0][0])
        assert_near(drained, results[0][2])


@pytest.mark.parametrize("delay", [0, 2, 4])
def test_where_nobody_contributes_nothing_changes_but_counts(delay):
    """All nodes fail in step 4, before whose update an exchange is due.

    With a delay of the whole period, they post again before they know that nobody contributed.
    """
    x, grads = dyadic_run(16, 3)
    late = delay == 4
    sent = 12 if late else 8
    x[:] = x[0]
    grads[4] = np.nan
    schedule = jdaso.constant(4, delay)
    averaging = jdaso.easgd(jdaso.axis_exchange("node", 3), alpha=0.125, schedule=schedule)
    params, _, drained, state = run(averaging, x, grads)
    steps = golden_family.sgd(np.nan_to_num(grads), LR).cumsum(axis=0)
    np.testing.assert_array_equal(params[:sent], (x + steps)[:sent])
    assert (drained[:sent] == x[0]).all()
    # All nodes contribute to the next exchange, with their unchanged parameters.
    c, old = x[0], params[sent - 1]
    pulled = old - 0.125 * (old - c) - LR * grads[sent]
    np.testing.assert_allclose(params[sent], pulled, rtol=1e-6)
    np.testing.assert_allclose(drained[sent], c + 0.125 * (old - c).sum(axis=0), rtol=1e-6)
    assert (state.skipped[-1] == 1).all()
    assert (state.left_out[-1] == 1 + late).all()
    assert (state.exchanges[-1] == 3).all()


@pytest.mark.parametrize("rule", [{"period": 4}, {"schedule": jdaso.constant(4, 4)}])
def test_alpha_is_beta_over_nodes_at_every_exchange(rule):
    """Whatever the period, so a schedule may replace it."""
    x, grads = random_run(0, 40, 5, alike=True)
    averaging = jdaso.easgd(jdaso.axis_exchange("node", 5), **rule)
    params, _, drained, _ = run(averaging, x, grads)
    expected = golden_family.easgd(x, golden_family.sgd(grads, LR), 4, alpha=0.9 / 5)
    assert_near(params, expected.params)
    assert_near(drained, expected.common)


@both_ways
@few(max_examples=2)
@given(
    delay=st.sampled_from([0, 2, 4, 4]),
    nodes=st.integers(2, 5),
    node=st.integers(0, 1),
    step=st.sampled_from([0, 3, 4, 5, 7, 8, 10]),  # communication is before steps 4, 8, 12
    seed=SEEDS,
)
def test_a_node_that_is_not_finite_takes_the_mean_of_the_others(
    in_place, delay, nodes, node, step, seed
):
    x, grads = random_run(seed, 40, nodes, alike=True)
    grads[step, node, 1] = np.inf
    exchange, schedule = jdaso.axis_exchange("node", nodes), jdaso.constant(4, delay)
    averaging = jdaso.easgd(exchange, alpha=0.9 / (4 * nodes), schedule=schedule)
    params, _, drained, state = run(averaging, x, grads, in_place=in_place)
    updates = golden_family.sgd(grads, LR)
    expected = golden_family.easgd(x, updates, 4, alpha=0.9 / (4 * nodes), delay=delay)
    assert_near(params, expected.params)
    assert_near(drained, expected.common)
    np.testing.assert_array_equal(state.left_out[-1], expected.left_out)
    assert state.skipped[-1].sum() == state.skipped[-1][node] == 1


def test_the_center_starts_as_the_parameters():
    params = {"w": np.arange(3, dtype=np.float32), "n": np.int32(7)}
    averaging = jdaso.easgd(jdaso.single_exchange(), period=4)
    center = jdaso.easgd_center(averaging.init(params))
    jax.tree.map(np.testing.assert_array_equal, center, params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_center_of_16_bit_parameters_has_32(dtype):
    averaging = jdaso.easgd(jdaso.single_exchange(), period=1)
    center = jdaso.easgd_center(averaging.init(np.ones(3, dtype=jax.numpy.dtype(dtype))))
    assert center.dtype == np.float32
