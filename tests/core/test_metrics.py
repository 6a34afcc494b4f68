"""Metrics of runs with a known result, and drift compared with NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import virtual_nodes as cluster

import jdaso

NODES, STEPS = 3, 14
T = np.arange(1, STEPS + 1)


def watched(averaging, grads=None, leaves=1):
    """The metrics of every node after every step, each of shape (STEPS, NODES)."""
    x, random = cluster.random_run(0, STEPS, NODES, size=4)
    grads = random if grads is None else grads

    def look(state, params):
        del params
        return jdaso.metrics(state)

    return cluster.simulate(averaging, x, grads, look=look, leaves=leaves)[1]


def on_all(steps):
    return np.repeat(np.asarray(steps)[:, None], NODES, axis=1)


def test_steps_and_exchanges_are_counted():
    exchange = jdaso.axis_exchange("node", NODES)
    seen = watched(jdaso.dasgd(exchange, period=4, delay=2))
    np.testing.assert_array_equal(seen.step, on_all(T))
    np.testing.assert_array_equal(seen.exchanges, on_all(T // 4))
    np.testing.assert_array_equal(seen.in_flight, on_all((T >= 4) & (T % 4 < 2)))
    np.testing.assert_array_equal(seen.merged, on_all((T >= 4) & (T % 4 == 2)))
    assert {int(i) for i in seen.phase.flat} == {jdaso.schedules.PHASES.index("cycling")}
    assert not seen.skipped.any()
    assert not seen.left_out.any()


def test_every_fragment_in_flight_counts():
    exchange = jdaso.axis_exchange("node", NODES)
    seen = watched(jdaso.dasgd(exchange, period=4, delay=3, fragments=2), leaves=2)
    # The first is posted at steps 4, 8, ..., the second at 2, 6, ..., both with a delay of 3 steps.
    in_flight = [(first <= T) & ((T - first) % 4 < 3) for first in (4, 2)]
    np.testing.assert_array_equal(seen.in_flight, on_all(np.sum(in_flight, axis=0)))
    assert seen.in_flight.max() == 2


def test_period_delay_and_phase_are_those_of_the_schedule():
    schedule = jdaso.cycling(period=2, warmup=4, cooldown=4, total=STEPS, epoch=2, delay=1)
    seen = watched(jdaso.daso(jdaso.axis_exchange("node", NODES), schedule=schedule))
    phases = [0] * 4 + [1] * 6 + [2] * 4
    np.testing.assert_array_equal(seen.phase, on_all(phases))
    np.testing.assert_array_equal(seen.period, on_all([(1, 2, 1)[phase] for phase in phases]))
    blocks = (np.array(phases) != 1) | (T % 2 == 0)  # every epoch ends with a blocking mean
    np.testing.assert_array_equal(seen.delay, on_all(np.where(blocks, 0, 1)))


def test_what_one_node_lost_is_its_own():
    _, grads = cluster.random_run(0, STEPS, NODES, size=4)
    grads[5, 1] = np.nan
    seen = watched(jdaso.local_sgd(jdaso.axis_exchange("node", NODES), 4), grads)
    here = np.arange(NODES) == 1
    np.testing.assert_array_equal(seen.skipped, (T[:, None] >= 6) & here)
    np.testing.assert_array_equal(seen.left_out, (T[:, None] >= 8) & here)


def test_outside_a_step_they_are_the_states_own_arrays():
    averaging = jdaso.local_sgd(jdaso.single_exchange(), 4)
    opt_state = optax.chain(optax.sgd(0.1, 0.9), averaging).init({"w": jnp.ones(3)})
    state, seen = jdaso.core.averaging_state(opt_state), jdaso.metrics(opt_state)
    assert seen.step is state.step
    assert seen.period is state.plan.period
    assert seen.merged is state.merged


def test_returned_by_a_step_they_outlive_the_state_that_is_donated():
    tx = jdaso.local_sgd(jdaso.single_exchange(), 4)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        return optax.apply_updates(params, updates), state, jdaso.metrics(state)

    params = {"w": jnp.ones(3)}
    state, seen = tx.init(params), []
    for _ in range(3):
        params, state, metrics = step(params, state)
        seen.append(metrics)
    assert [int(metrics.step) for metrics in seen] == [1, 2, 3]


@pytest.mark.parametrize("nodes", [1, 2, 5])
def test_drift_is_the_distance_from_the_mean(nodes):
    rng = np.random.default_rng(nodes)
    params = {
        "a": jnp.asarray(rng.normal(size=(nodes, 3, 2)), jnp.float32),
        "b": [jnp.asarray(3 + rng.normal(size=(nodes, 40)) / 50, jnp.bfloat16)],
        "steps": jnp.arange(nodes),  # not a parameter
    }
    exchange = jdaso.axis_exchange("node", nodes)
    found = jax.jit(jax.vmap(functools.partial(jdaso.drift, exchange), axis_name="node"))(params)
    flat = np.concatenate(
        [np.asarray(x, np.float64).reshape(nodes, -1) for x in (params["a"], params["b"][0])],
        axis=1,
    )
    expected = np.linalg.norm(flat - flat.mean(axis=0), axis=1)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    if nodes == 5:  # each node has another distance
        assert len({float(x) for x in found}) == nodes


def test_parameters_that_are_not_floats_do_not_drift():
    assert jdaso.drift(jdaso.single_exchange(), {"steps": jnp.arange(3)}) == 0


@pytest.mark.parametrize("behind", [None, optax.add_decayed_weights(-0.01), optax.scale(0.5)])
def test_drift_after_a_blocking_merge_shows_what_stands_behind_the_averaging(behind):
    exchange = jdaso.axis_exchange("node", 2)
    members = [optax.sgd(0.1), jdaso.local_sgd(exchange, period=2)]
    tx = optax.chain(*members, *([] if behind is None else [behind]))
    targets = jnp.array([[1.0, 2.0, 3.0], [4.0, -5.0, 6.0]])

    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, target):
        updates, state = tx.update(params - target, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, jdaso.drift(exchange, params)

    params = jnp.zeros_like(targets)
    state = jax.vmap(tx.init)(params)
    for _ in range(4):
        params, state, drift = jax.jit(step)(params, state, targets)
    assert (drift > 1e-3).all() if behind else (drift < 1e-6).all()
