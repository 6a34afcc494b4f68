"""Common mistakes get a message that says what to do, and some of them just work."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso.core.command_line import wrapped

EXCHANGE = jdaso.single_exchange()
PARAMS = {"w": jnp.ones(3)}


def averaging():
    return jdaso.dasgd(EXCHANGE, period=2, delay=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: jdaso.broadcast(EXCHANGE, model),
        lambda model: jdaso.consensus(EXCHANGE, model),
        lambda model: jdaso.drift(EXCHANGE, model),
        lambda model: averaging().init(model),
        lambda model: jdaso.chain(optax.sgd(0.1), averaging()).init(model),
    ],
)
def test_a_leaf_that_is_no_array_is_named(call):
    model = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"requires arrays.*activation.*eqx.partition"):
        call(model)
    call(eqx.filter(model, eqx.is_array))


def test_a_number_is_to_be_converted():
    with pytest.raises(
        ValueError, match=r"requires arrays, got 1.0 at \['w'\]: convert it with jnp"
    ):
        averaging().init({"w": 1.0})


def test_broadcast_of_typed_keys():
    tree = {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2)}
    sent = jdaso.broadcast(EXCHANGE, tree)
    assert jax.tree.map(jax.random.key_impl, sent) == jax.tree.map(jax.random.key_impl, tree)
    for name, key in tree.items():
        np.testing.assert_array_equal(
            jax.random.key_data(sent[name]), jax.random.key_data(key), strict=True
        )


def test_swapped_arguments():
    with pytest.raises(ValueError, match=r"broadcast requires the exchange first, .* got a dict"):
        jdaso.broadcast(PARAMS, EXCHANGE)


def test_a_loss_that_is_no_scalar_and_gradients_of_another_tree():
    tx = jdaso.chain(optax.sgd(0.1), averaging())
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"value must be the loss, a scalar, got the shape \(4,\)"):
        jdaso.apply_gradients(tx, PARAMS, state, PARAMS, value=jnp.ones(4))
    with pytest.raises(ValueError, match=r"got a leaf \"\['b'\]\" that params does not have"):
        jdaso.apply_gradients(tx, {**PARAMS, "b": jnp.ones(1)}, state, PARAMS)
    with pytest.raises(ValueError, match=r"got none for the leaf \"\['w'\]\": pass zeros for it"):
        jdaso.apply_gradients(tx, {}, state, PARAMS)
    with pytest.raises(ValueError, match=r"got \(4,\) at \"\['w'\]\", where params has \(3,\)"):
        jdaso.apply_gradients(tx, {"w": jnp.ones(4)}, state, PARAMS)
    tx.update({"w": None}, state, PARAMS)  # no change


def test_three_members_of_a_chain():
    with pytest.raises(ValueError, match=r"put the first two into optax.chain"):
        jdaso.chain(optax.clip(1.0), optax.sgd(0.1), averaging())


AVERAGING = averaging()
CHAIN = jdaso.chain(optax.sgd(0.1), AVERAGING)
WRAPPERS = {
    "chain": (optax.chain(optax.sgd(0.1), AVERAGING), AVERAGING),
    "named_chain": (optax.named_chain(("sgd", optax.sgd(0.1)), ("mean", AVERAGING)), AVERAGING),
    "apply_if_finite": (optax.apply_if_finite(CHAIN, 5), CHAIN),
    "inject_hyperparams": (optax.inject_hyperparams(lambda rate: CHAIN)(0.1), CHAIN),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_drain_of_a_wrapper_says_what_to_drain(wrapper):
    tx, inner = WRAPPERS[wrapper]
    state = tx.init(PARAMS)
    advice = r"call jdaso.drain\(averaging, opt_state, params\), and .* jdaso.drain\(tx, opt_"
    with pytest.raises(ValueError, match=advice):
        jdaso.drain(tx, state, PARAMS)
    jdaso.drain(inner, state, PARAMS)


def test_multi_steps_inside_a_chain_steps_the_averaging_at_every_micro_batch():
    inner = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
    tx = jdaso.chain(inner, jdaso.local_sgd(EXCHANGE, period=4))
    step = jax.jit(lambda params, state: jdaso.apply_gradients(tx, PARAMS, state, params))
    params, state = PARAMS, tx.init(PARAMS)
    seen = []
    for _ in range(8):
        params, state = step(params, state)
        seen.append((float(params["w"][0]), int(jdaso.metrics(state).exchanges)))
    updates = [0, 1, 1, 2, 2, 3, 3, 4]
    exchanges = [0, 0, 0, 1, 1, 1, 1, 2]
    expected = np.stack([1 - 0.1 * np.array(updates), exchanges], axis=1)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)


@pytest.mark.parametrize("whole", [True, False])
def test_steps_outside_jit_are_compiled_once(whole):
    traces = []

    def count(updates, params=None):
        traces.append(1)
        return updates

    tx = jdaso.chain(optax.chain(optax.stateless(count), optax.sgd(0.1)), averaging())
    params, state = PARAMS, tx.init(PARAMS)
    for step in range(4):
        if whole:
            params, state = jdaso.apply_gradients(tx, params, state, params, value=1.0)
        else:
            updates, state = tx.update(params, state, params, value=1.0)
            params = optax.apply_updates(params, updates)
        if step == 0:
            first = len(traces)
    assert len(traces) == first


def test_lines_are_wrapped_but_for_commands(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    command = "next: python -m jdaso predict --parameters 1"
    assert wrapped(f"a line of more than twenty\n\n{command}") == (
        f"a line of more than\ntwenty\n\n{command}"
    )
