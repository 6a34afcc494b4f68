"""DASO against the NumPy recursion of tests/golden.py, and properties beyond the numbers."""

import functools

import golden
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from virtual_nodes import LR, assert_near, both_ways, dyadic_run, few, random_run, simulate

import jdaso

EXACT = {"wire": "float32", "blocking_wire": "float32"}


def assert_follows(result, expected):
    """Parameters, period, delay, phase, exchanges and left-out nodes follow the recursion."""
    params, state = result
    for node in range(params.shape[1]):  # equal on all nodes
        np.testing.assert_array_equal(state.plan.period[:, node], expected.period)
        np.testing.assert_array_equal(state.plan.delay[:, node], expected.delay)
        np.testing.assert_array_equal(state.plan.phase[:, node], expected.phase)
        np.testing.assert_array_equal(state.fragments[0].posted[:, node], expected.in_flight)
    np.testing.assert_array_equal(state.left_out[-1], expected.left_out)
    assert_near(params, expected.params)


def random_losses(rng, steps, nodes, epoch):
    """Losses whose means per epoch repeat, improve, improve by too little, or get worse.

    The levels are at least 2 % away from the threshold of 5 %, the noise is 0.1 %: no decision
    hangs on a rounding.
    """
    levels = rng.choice([1.0, 0.98, 0.7, 0.4, 2.0], size=steps)
    level = levels[np.arange(steps) // epoch]
    return level[:, None] * rng.uniform(0.999, 1.001, size=(steps, nodes))


@st.composite
def runs(draw):
    """A valid schedule, a cluster, and the seed of its gradients and losses."""
    period = draw(st.integers(1, 6))
    total = 100
    warmup = draw(st.integers(0, 40))
    cooldown = draw(st.integers(0, total - warmup - period))
    schedule = golden.Schedule(
        period=period,
        delay=draw(st.integers(0, period)),
        warmup=warmup,
        cooldown=cooldown if draw(st.booleans()) else min(cooldown, 10),
        total=total,
        epoch=draw(st.integers(1, 30)),
        patience=draw(st.integers(0, 2)),
    )
    nodes = draw(st.integers(1, 6))
    momentum = draw(st.sampled_from([0.0, 0.9]))
    return schedule, nodes, momentum, draw(st.integers(0, 2**32 - 1))


def cycling(schedule):
    epoch = None if schedule.epoch == np.inf else schedule.epoch
    return jdaso.cycling(**vars(schedule) | {"epoch": epoch})


@both_ways
@few(max_examples=8)
@given(runs())
def test_follows_the_recursion_through_phases_and_plateaus(in_place, run):
    schedule, nodes, momentum, seed = run
    x, grads = random_run(seed, schedule.total, nodes)
    losses = random_losses(np.random.default_rng(seed), schedule.total, nodes, schedule.epoch)
    averaging = jdaso.daso(jdaso.axis_exchange("node", nodes), schedule=cycling(schedule), **EXACT)
    result = simulate(averaging, x, grads, losses, momentum, in_place=in_place)
    assert_follows(result, golden.daso(x, grads, schedule, LR, momentum, losses))


@both_ways
@few(max_examples=3)
@given(
    st.integers(1, 6).flatmap(lambda b: st.tuples(st.just(b), st.integers(0, b))),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
)
def test_follows_the_recursion_with_constant_period_and_delay(in_place, period_delay, nodes, seed):
    period, delay = period_delay
    x, grads = random_run(seed, 100, nodes)
    averaging = jdaso.daso(jdaso.axis_exchange("node", nodes), period, delay, **EXACT)
    expected = golden.daso(x, grads, golden.Schedule(period, delay), LR)
    assert_follows(simulate(averaging, x, grads, in_place=in_place), expected)


@both_ways
@few(max_examples=3)
@given(
    delay=st.integers(0, 4),
    nodes=st.integers(2, 5),
    node=st.integers(0, 1),
    step=st.sampled_from([0, 8, 9, 11, 20, 21, 23, 36]),  # every phase, with and without a post
    seed=st.integers(0, 2**32 - 1),
)
def test_a_node_that_is_not_finite_takes_the_mean_of_the_others(
    in_place, delay, nodes, node, step, seed
):
    schedule = golden.Schedule(period=4, delay=delay, warmup=6, cooldown=6, total=40, epoch=11)
    x, grads = random_run(seed, 40, nodes)
    grads[step, node, 1] = np.inf
    averaging = jdaso.daso(jdaso.axis_exchange("node", nodes), schedule=cycling(schedule), **EXACT)
    result = simulate(averaging, x, grads, in_place=in_place)
    expected = golden.daso(x, grads, schedule, LR)
    assert_follows(result, expected)
    assert expected.left_out.sum() == expected.left_out[node] <= 2
    assert np.isfinite(result[0][-1]).all()


PLATEAUS = golden.Schedule(
    period=4, delay=3, warmup=8, cooldown=8, total=104, epoch=8, patience=0, threshold=0.05
)


def test_period_and_delay_halve_at_a_plateau_and_start_again_from_one():
    x, grads = random_run(0, 104, 3)
    losses = np.ones((104, 3))  # the best of the first epoch of the cycling phase, then plateaus
    averaging = jdaso.daso(jdaso.axis_exchange("node", 3), schedule=cycling(PLATEAUS), **EXACT)
    params, state = simulate(averaging, x, grads, losses, momentum=0.9)
    first_of_epoch = slice(8, 96, 8)
    assert state.plan.period[first_of_epoch, 0].tolist() == [4, 4, 2, 1, 4, 2, 1, 4, 2, 1, 4]
    assert state.plan.delay[first_of_epoch, 0].tolist() == [3, 3, 1, 1, 3, 1, 1, 3, 1, 1, 3]
    assert_follows((params, state), golden.daso(x, grads, PLATEAUS, LR, 0.9, losses))


def test_plateaus_are_decided_by_the_mean_over_all_nodes():
    # Node 0 improves tenfold each epoch. The mean of both nodes improves too little.
    x, grads = random_run(1, 104, 2)
    losses = np.ones((104, 2))
    losses[:, 0] = 1e-3 * 0.1 ** (np.arange(104) // 8)
    averaging = jdaso.daso(jdaso.axis_exchange("node", 2), schedule=cycling(PLATEAUS), **EXACT)
    params, state = simulate(averaging, x, grads, losses)
    assert (state.plan.period[24] == 2).all()
    assert_follows((params, state), golden.daso(x, grads, PLATEAUS, LR, 0.0, losses))


def test_warm_up_epochs_do_not_count_as_plateaus():
    schedule = golden.Schedule(period=4, delay=1, warmup=16, total=60, epoch=2, patience=2)
    x, grads = random_run(2, 60, 2)
    averaging = jdaso.daso(jdaso.axis_exchange("node", 2), schedule=cycling(schedule), **EXACT)
    _, state = simulate(averaging, x, grads, np.ones((60, 2)))
    assert (state.plan.period[16] == 4).all()


def test_losses_that_are_not_finite_are_ignored():
    schedule = golden.Schedule(period=4, delay=1, total=40, epoch=4, patience=0)
    x, grads = random_run(3, 40, 2)
    losses = np.ones((40, 2)) * 0.5 ** (np.arange(40) // 4)[:, None]
    losses[5, 1] = np.nan  # within an epoch
    losses[16:20] = np.inf  # a whole epoch
    averaging = jdaso.daso(jdaso.axis_exchange("node", 2), schedule=cycling(schedule), **EXACT)
    _, state = simulate(averaging, x, grads, losses)
    assert (state.plan.period == 4).all()  # every epoch improves


def test_without_value_period_and_delay_never_change():
    x, grads = random_run(4, 104, 2)
    averaging = jdaso.daso(jdaso.axis_exchange("node", 2), schedule=cycling(PLATEAUS), **EXACT)
    params, state = simulate(averaging, x, grads, losses=None)
    assert (state.plan.period[8:96] == 4).all()
    assert_follows((params, state), golden.daso(x, grads, PLATEAUS, LR))


def test_an_exchange_cut_short_by_the_end_of_a_phase_is_merged_with_its_age():
    # Posted after step 5 + 4 - 1 = 8, due after step 12, but step 9 is the phase's last.
    schedule = golden.Schedule(period=4, delay=4, warmup=5, cooldown=5, total=15)
    x, grads = random_run(5, 15, 3)
    expected = golden.daso(x, grads, schedule, LR)
    assert expected.ages[9] == [1]
    averaging = jdaso.daso(jdaso.axis_exchange("node", 3), schedule=cycling(schedule), **EXACT)
    params, state = simulate(averaging, x, grads)
    before = params[8] - LR * grads[9]
    one_late = (2 * 1 * before + params[8].sum(0)) / (2 * 1 + 3)
    np.testing.assert_allclose(params[9], one_late, rtol=1e-5)  # some float32 roundings
    assert_follows((params, state), expected)


@pytest.mark.parametrize("delay", [1, 4])
def test_an_epoch_ends_with_equal_nodes_and_nothing_in_flight(delay):
    schedule = golden.Schedule(period=4, delay=delay, total=30, epoch=6)
    x, grads = random_run(6, 30, 3)
    averaging = jdaso.daso(jdaso.axis_exchange("node", 3), schedule=cycling(schedule), **EXACT)
    params, state = simulate(averaging, x, grads)
    last = slice(5, None, 6)
    assert not state.fragments[0].posted[last].any()
    # Equal up to two roundings of numbers below 4: updates = merged - params, and back.
    assert np.abs(params).max() < 4
    assert (np.ptp(params[last], axis=1) <= 2 * 2.0**-23).all()
    assert np.ptp(params[4::6], axis=1).max() > 1e-3  # not one step earlier


def test_blocking_phases_round_to_bfloat16_and_the_cycling_phase_does_not():
    # All arithmetic is exact (P = 4, 2S + P = 8), so only the wire rounds.
    schedule = golden.Schedule(period=4, delay=2, warmup=6, cooldown=6, total=20)
    x, grads = dyadic_run(20, 4)
    expected = golden.daso(x, grads, schedule, LR, blocking_wire="bfloat16")
    averaging = jdaso.daso(
        jdaso.axis_exchange("node", 4), schedule=cycling(schedule)
    )  # the defaults
    params, _ = simulate(averaging, x, grads)
    np.testing.assert_array_equal(params, expected.params)
    assert (expected.params != golden.daso(x, grads, schedule, LR).params).any(axis=(1, 2)).all()


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_the_cycling_phase_rounds_to_the_wire_it_is_given(wire):
    x, grads = dyadic_run(12, 4)
    x, grads = x + np.float32(2**-12), grads  # bits that 16-bit numbers lack
    expected = golden.daso(x, grads, golden.Schedule(4, 2), LR, wire=wire)
    averaging = jdaso.daso(jdaso.axis_exchange("node", 4), 4, 2, wire=wire)
    params, _ = simulate(averaging, x, grads)
    np.testing.assert_array_equal(params, expected.params)
    assert (
        expected.params[-1] != golden.daso(x, grads, golden.Schedule(4, 2), LR).params[-1]
    ).any()


def test_float16_sums_do_not_overflow():
    x = np.full((4, 2), 40000.0)  # the sum of four exceeds 65504
    averaging = jdaso.daso(jdaso.axis_exchange("node", 4), 1, 0, wire="float16")
    params, state = simulate(averaging, x, np.zeros((2, 4, 2)))
    np.testing.assert_array_equal(params[-1], x)
    assert not state.left_out.any()


def test_period_one_without_delay_is_synchronous_sgd_on_the_joint_batch():
    nodes, steps, batch = 3, 50, 4
    rng = np.random.default_rng(8)
    inputs = jnp.asarray(rng.normal(size=(steps, nodes, batch, 5)), jnp.float32)
    targets = inputs @ jnp.arange(1.0, 6.0) + 0.1

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    averaging = jdaso.daso(jdaso.axis_exchange("node", nodes), 1, 0, **EXACT)
    tx = optax.chain(optax.sgd(0.05), averaging)

    def alone(w, x, y):
        def step(carry, batch):
            w, state = carry
            updates, state = tx.update(jax.grad(loss)(w, *batch), state, w)
            return (optax.apply_updates(w, updates), state), ()

        return lax.scan(step, (w, tx.init(w)), (x, y))[0][0]

    start = jnp.zeros(5)
    separate = jax.vmap(alone, (None, 1, 1), axis_name="node")(start, inputs, targets)
    joint = start
    for x, y in zip(inputs, targets, strict=True):
        joint = joint - 0.05 * jax.grad(loss)(joint, x.reshape(-1, 5), y.reshape(-1))
    assert np.linalg.norm(joint - jnp.arange(1.0, 6.0)) < 0.5  # training succeeds
    # The tolerance covers 50 float32 steps with sums in another order.
    np.testing.assert_allclose(separate, jnp.broadcast_to(joint, (nodes, 5)), rtol=1e-5)


def test_consensus_has_the_same_bits_on_all_nodes():
    tree = {"w": jax.random.normal(jax.random.key(0), (5, 100)), "n": jnp.arange(5)}
    exchange = jdaso.axis_exchange("node", 5)
    mean = jax.vmap(lambda tree: jdaso.consensus(exchange, tree), axis_name="node")(tree)
    assert len(set(map(bytes, np.asarray(mean["w"])))) == 1
    # An absolute tolerance, because the mean of five standard normal numbers may be near 0.
    np.testing.assert_allclose(mean["w"][0], np.mean(tree["w"], axis=0), atol=1e-6)
    np.testing.assert_array_equal(mean["n"], tree["n"])


def test_a_node_that_is_left_out_is_counted_and_recovers():
    x, grads = random_run(9, 3, 3)
    grads[0, 1] = np.nan
    averaging = jdaso.daso(jdaso.axis_exchange("node", 3), 1, 0, **EXACT)
    params, state = simulate(averaging, x, grads)
    assert state.left_out[-1].tolist() == [0, 1, 0]
    others = (x - LR * grads[0])[[0, 2]].mean(axis=0)
    assert_near(params[:1], np.tile(others, (1, 3, 1)))


def test_a_node_that_loses_its_numbers_between_two_exchanges_recovers_at_the_next():
    x, grads = random_run(12, 8, 3)
    grads[1, 0] = np.nan  # exchanges are posted and merged after steps 3 and 7
    averaging = jdaso.daso(jdaso.axis_exchange("node", 3), 4, 0, **EXACT)
    params, state = simulate(averaging, x, grads)
    assert state.left_out[-1].tolist() == [1, 0, 0]
    others = (x - LR * grads[:4].sum(axis=0))[1:].mean(axis=0)
    assert_near(params[3:4], np.tile(others, (1, 3, 1)))


def test_nothing_is_merged_when_no_node_is_finite():
    x, grads = random_run(10, 1, 2)
    grads[0, :, 0] = np.inf
    averaging = jdaso.daso(jdaso.axis_exchange("node", 2), 1, 0, **EXACT)
    params, state = simulate(averaging, x, grads)
    assert state.left_out[0].tolist() == [1, 1]
    # Each node keeps its own parameters, with or without its step.
    assert (np.abs(params[0] - x)[:, 1:] <= LR * np.abs(grads[0, :, 1:]) + 1e-6).all()


def test_drain_merges_with_the_actual_age():
    # Posted after step 3 with delay 3; training ends after step 4, one step later.
    x, grads = random_run(11, 5, 3)
    averaging = jdaso.daso(jdaso.axis_exchange("node", 3), 4, 3, **EXACT)
    tx = optax.chain(optax.sgd(LR), averaging)

    def node(x, grads):
        state = tx.init(x)
        for grad in grads:
            updates, state = tx.update(grad, state, x)
            x = optax.apply_updates(x, updates)
        return x, *jdaso.drain(averaging, state, x)

    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    before, after, state = jax.jit(jax.vmap(node, (0, 1), axis_name="node"))(f32(x), f32(grads))
    posted = x - LR * grads[:4].sum(axis=0)
    np.testing.assert_allclose(after, (2 * before + posted.sum(axis=0)) / 5, rtol=1e-5)  # float32
    assert not jdaso.core.averaging_state(state).fragments[0].posted.any()


def test_drain_with_nothing_in_flight_changes_nothing():
    averaging = jdaso.daso(jdaso.single_exchange(), 4, 2)
    params = jnp.arange(3.0)
    state = averaging.init(params)
    drained, same = jdaso.drain(averaging, state, params)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, (drained, same), (params, state)))


@pytest.mark.parametrize("argument", ["wire", "blocking_wire", "nonfinite"])
def test_an_unknown_choice_is_named(argument):
    with pytest.raises(ValueError, match=f"{argument} .*'float8'"):
        jdaso.daso(jdaso.single_exchange(), 1, 0, **{argument: "float8"})


@pytest.mark.parametrize("argument", ["wire", "blocking_wire"])
def test_a_wire_that_contradicts_the_exchange_is_refused(argument):
    exchange = jdaso.single_exchange(wire="bfloat16")
    with pytest.raises(ValueError, match=argument):
        jdaso.daso(exchange, 1, 0, **{argument: "float16"})


def test_an_axis_of_another_size_is_refused():
    tx = jdaso.daso(jdaso.axis_exchange("node", 3), 1, 0)
    x = jnp.zeros((2, 1))
    state = jax.vmap(tx.init)(x)
    with pytest.raises(ValueError, match=r"num_nodes=3.*2 positions"):
        jax.vmap(lambda s, x: tx.update(x, s, x), axis_name="node")(state, x)
