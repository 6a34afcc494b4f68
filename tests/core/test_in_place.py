"""Programs for GPUs loop where those for CPUs have conditionals, and give the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso.core.exchange import Exchange
from jdaso.core.tree import change_if, change_unless_skipped

NODES = 3
LATE = jdaso.constant(4, 2)
AVERAGINGS = {
    "daso": lambda ex: jdaso.daso(ex, schedule=LATE),
    "daso, blocking": lambda ex: jdaso.daso(ex, 2, 0),
    "daso, int8": lambda ex: jdaso.daso(ex, schedule=LATE, wire="int8"),
    "daso, 2 fragments": lambda ex: jdaso.daso(ex, schedule=LATE, fragments=2),
    "dasgd": lambda ex: jdaso.dasgd(ex, 2, 2),
    "easgd": lambda ex: jdaso.easgd(ex, alpha=0.1, schedule=LATE),
    "diloco": lambda ex: jdaso.diloco(ex, 3, optax.sgd(0.7, momentum=0.9), 1, warmup=0),
}


def train(averaging, moments, steps=12):
    """Parameters and state after some steps on a virtual cluster, one of which is skipped."""
    ex = jdaso.axis_exchange("node", NODES)
    tx = jdaso.chain(optax.adam(0.1), averaging(ex), moments)
    params = {"a": jnp.linspace(-1, 1, NODES * 130).reshape(NODES, 130), "b": jnp.ones((NODES, 3))}
    state = jax.vmap(tx.init)(params)

    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, noise):
        grads = jax.tree.map(lambda x: x + noise, params)
        return jdaso.apply_gradients(tx, grads, state, params)

    step = jax.jit(step)
    for i in range(steps):
        noise = jnp.arange(float(NODES)) + i
        params, state = step(params, state, noise.at[1].set(jnp.nan) if i == 5 else noise)
    return jax.vmap(functools.partial(jdaso.drain, tx))(state, params)


@pytest.mark.parametrize("name", AVERAGINGS)
def test_a_loop_gives_the_numbers_of_a_conditional(name, monkeypatch):
    moments = {"daso": "average", "dasgd": "reset"}.get(name, "local")
    expected = train(AVERAGINGS[name], moments)
    monkeypatch.setattr(Exchange, "platform", "gpu")
    for x, y in zip(
        jax.tree.leaves(expected), jax.tree.leaves(train(AVERAGINGS[name], moments)), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("function", [change_if, change_unless_skipped])
@pytest.mark.parametrize("condition", [True, False])
def test_operands_change_if_the_condition_holds(function, platform, condition):
    def change(x, tree):
        return x + 1, {"k": tree["k"] * 2}

    @jax.jit
    def run(condition):
        return function(platform, condition, change, jnp.arange(2), {"k": jnp.ones(2)})

    x, tree = run(condition)
    assert x.tolist() == ([1, 2] if condition else [0, 1])
    assert tree["k"].tolist() == ([2, 2] if condition else [1, 1])
