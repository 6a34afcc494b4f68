"""Inside a wrapper, an averaging knows only some of the parameters, and drain is given all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso

NODES = 2
ALGORITHMS = {
    "daso": lambda x: jdaso.chain(optax.sgd(0.1), jdaso.daso(x, 4, 3)),
    "int8": lambda x: jdaso.chain(optax.sgd(0.1), jdaso.dasgd(x, 4, 3, wire="int8")),
    "fragments": lambda x: jdaso.chain(optax.adam(0.1), jdaso.dasgd(x, 4, 3, fragments=2)),
    "average": lambda x: jdaso.chain(optax.adam(0.1), jdaso.dasgd(x, 4, 3), moments="average"),
    "eamsgd": lambda x: jdaso.eamsgd(x, 4, 0.1, 0.9),
    "diloco": lambda x: jdaso.chain(optax.sgd(0.1), jdaso.diloco(x, 4, delay=3, mix=0.5)),
}


def train(tx, params, steps=5):
    """Trains a virtual cluster on gradients that are equal for equal names, with one in flight."""

    def step(params, state, node):
        grads = jax.tree.map(lambda x: (node + 1) * jnp.ones_like(x), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step_of_all = jax.jit(jax.vmap(step, axis_name="node"))
    state = jax.vmap(tx.init)(params)
    for _ in range(steps):
        params, state = step_of_all(params, state, jnp.arange(float(NODES)))
    return params, state


@pytest.mark.parametrize("name", ALGORITHMS)
def test_drain_merges_what_an_averaging_inside_of_partition_has_in_flight(name):
    shared = {"a": jnp.arange(6.0).reshape(NODES, 3), "b": {"c": jnp.ones((NODES, 4))}}
    own = {"own": jnp.full((NODES, 2), 7.0)}
    inner = ALGORITHMS[name](jdaso.axis_exchange("node", NODES))
    groups = {"a": "shared", "b": {"c": "shared"}, "own": "own"}
    outer = optax.partition({"shared": inner, "own": optax.sgd(0.1)}, groups)
    alone, of_alone = train(inner, shared)
    params, state = train(outer, shared | own)
    assert bool(jdaso.core.averaging_state(state).fragments[0].posted.all())

    def drain(state, params):
        return jdaso.drain(inner, state, params)

    drained, after = jax.vmap(drain, axis_name="node")(state, params)
    expected, _ = jax.vmap(drain, axis_name="node")(of_alone, alone)
    np.testing.assert_array_equal(drained.pop("own"), params["own"])
    jax.tree.map(np.testing.assert_array_equal, drained, expected)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert not jdaso.core.averaging_state(after).fragments[0].posted.any()


def test_functions_that_read_a_state_inside_of_partition_take_all_parameters():
    exchange = jdaso.single_exchange()
    params = {"shared": jnp.ones(3), "own": jnp.full(2, 7.0)}
    groups = {"shared": "shared", "own": "own"}

    def state_of(inner):
        return optax.partition({"shared": inner, "own": optax.sgd(0.1)}, groups).init(params)

    diloco = state_of(jdaso.diloco(exchange, 4))
    jax.tree.map(np.testing.assert_array_equal, jdaso.diloco_anchor(diloco, params), params)
    eamsgd = state_of(jdaso.eamsgd(exchange, 4, 0.1, 0.9))
    jax.tree.map(np.testing.assert_array_equal, jdaso.eamsgd_eval_params(eamsgd, params), params)
    assert float(jdaso.drift(exchange, params)) == 0
