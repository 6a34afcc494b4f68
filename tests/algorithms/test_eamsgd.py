"""EAMSGD against easgd Algorithm 2 in its own variables: x, v and the center."""

import golden_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, both_ways, few, random_run, train

import jdaso

CURVATURE = np.linspace(0.5, 8.0, 60).astype(np.float32)


def gradient(y, noise):
    """Gradient of a quadratic, for NumPy and JAX."""
    return CURVATURE * y - noise


def observed(tx):
    """x and v of this node, the center, and the center with the exchange in flight."""

    def look(state, params):
        _, drained = jdaso.drain(tx, state, params)
        x, v = jdaso.eamsgd_eval_params(state, params), state.velocity
        return x[0], v[0], jdaso.easgd_center(state)[0], jdaso.easgd_center(drained)[0]

    return look


@both_ways
@few(max_examples=2)
@given(
    period=st.integers(1, 6),
    nodes=st.integers(1, 6),
    momentum=st.sampled_from([0.5, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_follows_algorithm_2(in_place, period, nodes, momentum, seed):
    x, noise = random_run(seed, 100, nodes, alike=True)
    tx = jdaso.eamsgd(jdaso.axis_exchange("node", nodes), period, LR, momentum, alpha=0.9 / nodes)
    params, (own, v, _, drained) = train(
        tx, x, noise, gradient=gradient, look=observed(tx), in_place=in_place
    )
    expected = golden_family.eamsgd(
        x, lambda t, y: gradient(y, noise[t]), 100, period, 0.9 / nodes, LR, momentum
    )
    # The same float32 arithmetic as in test_daso.py, and one rounding for each x = y - delta v.
    assert_near(own, expected.params)
    assert_near(drained[:, 0], expected.common)
    assert (drained == drained[:, :1]).all()
    # The trained parameters are the point of the next gradient.
    np.testing.assert_allclose(params, own + momentum * v, rtol=1e-6, atol=1e-6)


def test_a_learning_rate_may_be_a_schedule():
    x, noise = random_run(0, 60, 3, alike=True)
    schedule = optax.linear_schedule(2 * LR, 0.0, transition_steps=40)
    tx = jdaso.eamsgd(jdaso.axis_exchange("node", 3), 4, schedule, momentum=0.9)
    _, (own, _, _, _) = train(tx, x, noise, gradient=gradient, look=observed(tx))
    rates = 2 * LR * np.maximum(0, 1 - np.arange(60) / 40)
    expected = golden_family.eamsgd(
        x, lambda t, y: rates[t] * gradient(y, noise[t]), 60, 4, 0.9 / 3, 1.0, 0.9
    )
    assert_near(own, expected.params)


def test_a_step_that_is_not_finite_does_not_change_v():
    tx = jdaso.eamsgd(jdaso.single_exchange(), 4, LR, momentum=0.5)
    params, state = jnp.ones(3), tx.init(jnp.ones(3))
    updates, state = tx.update(jnp.ones(3), state, params)
    before = state.velocity
    updates, state = tx.update(jnp.array([1.0, jnp.nan, 1.0]), state, params + updates)
    np.testing.assert_array_equal(state.velocity, before)
    np.testing.assert_array_equal(updates, jnp.zeros(3))
    assert int(jdaso.core.averaging_state(state).skipped) == 1


def test_integers_do_not_change():
    tx = jdaso.eamsgd(jdaso.single_exchange(), 1, LR, momentum=0.5)
    params = {"w": jnp.ones(3), "n": jnp.int32(7)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": jnp.ones(3), "n": jnp.int32(0)}, state, params)
        params = optax.apply_updates(params, updates)
    assert params["n"] == 7
    assert jdaso.eamsgd_eval_params(state, params)["n"] == 7


def test_drain_gives_a_lost_node_the_mean_of_the_others():
    """A node is lost in step 2 and left out before step 4. Then drain merges the exchange."""
    x, noise = random_run(0, 8, 3, alike=True)
    noise[2, 1, 0] = np.nan
    tx = jdaso.eamsgd(jdaso.axis_exchange("node", 3), 4, LR, momentum=0.9, alpha=0.1)

    def look(state, params):
        drained, drained_state = jdaso.drain(tx, state, params)
        x = jdaso.eamsgd_eval_params(state, params)[0]
        return (
            x,
            drained[0],
            jdaso.eamsgd_eval_params(drained_state, drained)[0],
            drained_state.velocity[0],
        )

    params, (own, drained, evaluated, v) = train(tx, x, noise, gradient=gradient, look=look)
    others = [0, 2]
    for t in range(4, 8):
        mean = own[3, others].mean(axis=0)  # before step 4
        np.testing.assert_allclose(evaluated[t, 1], mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(drained[t, 1] - 0.9 * v[t, 1], mean, rtol=1e-6, atol=1e-6)
        assert np.abs(own[t, 1] - mean).max() > 0.01  # its own x was different
        np.testing.assert_array_equal(
            drained[t, others], params[t, others]
        )  # only the center moved


def test_drain_with_nothing_in_flight_changes_no_bit():
    tx = jdaso.eamsgd(jdaso.single_exchange(), 4, LR, momentum=0.9)
    params = {"w": jnp.linspace(-1, 1, 50), "n": jnp.int32(7)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": params["w"] ** 2, "n": jnp.int32(0)}, state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, jdaso.drain(tx, state, params), (params, state))


def test_x_is_the_same_to_the_last_bits_in_float64():
    """delta has the precision of the parameters. 0.9 is not a float32 number."""
    with jax.enable_x64(True):
        tx = jdaso.eamsgd(jdaso.single_exchange(), 4, LR, momentum=0.9)
        y, state = jnp.linspace(-1, 1, 50), tx.init(jnp.linspace(-1, 1, 50))
        x, v = np.asarray(y), 0.0
        for t in range(3):
            v = 0.9 * v - LR * np.cos(np.asarray(y) + t)
            updates, state = tx.update(jnp.cos(y + t), state, y)
            y, x = y + updates, x + v
        own = jdaso.eamsgd_eval_params(state, y)
        assert own.dtype == np.float64
        np.testing.assert_allclose(own, x, rtol=0, atol=1e-14)
