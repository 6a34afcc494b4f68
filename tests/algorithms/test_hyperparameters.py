"""Algorithms use the value of the step for numbers traced by optax.inject_hyperparams."""

import golden_family
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import inject_hyperparams
from virtual_nodes import LR, assert_near, random_run, train

import jdaso

NODES, STEPS = 3, 40
EXCHANGE = jdaso.axis_exchange("node", NODES)


def with_sgd(averaging):
    return optax.chain(optax.sgd(LR), averaging)


def test_an_annealed_xi_is_that_of_the_step_of_the_merge():
    x, grads = random_run(0, STEPS, NODES)
    anneal = optax.linear_schedule(0.9, 0.1, STEPS)
    tx = inject_hyperparams(lambda xi: with_sgd(jdaso.dasgd(EXCHANGE, 4, 2, xi)))(anneal)
    params, _ = train(tx, x, grads)
    merges = iter(range(5, STEPS, 4))

    def merge(x, mean, state):
        xi = 0.9 - 0.8 * next(merges) / STEPS
        return xi * x + (1 - xi) * mean, (mean,)

    updates = golden_family.sgd(grads, LR)
    assert_near(params, golden_family.late_means(x, updates, 4, 2, 0, merge, (x[0],)).params)


def test_an_annealed_momentum_of_eamsgd_is_that_of_the_step():
    """v <- delta_t v - eta g(y), and the next gradient is taken at y = x + delta_t v."""
    x, noise = random_run(1, STEPS, NODES, alike=True)

    def gradient(y, noise):
        return y - noise

    def look(state, params):
        return jdaso.eamsgd_eval_params(state, params)[0]

    anneal = optax.linear_schedule(0.5, 0.9, STEPS)
    tx = inject_hyperparams(lambda m: jdaso.eamsgd(EXCHANGE, 4, LR, m, alpha=0.1))(anneal)
    params, own = train(tx, x, noise, gradient=gradient, look=look)
    y, v, c = x, np.zeros_like(x), x[0]
    expected = []
    for t in range(STEPS):
        delta = 0.5 + 0.4 * t / STEPS
        g = gradient(y, noise[t])
        if t > 0 and t % 4 == 0:
            x, c = x - 0.1 * (x - c), c + 0.1 * (x - c).sum(axis=0)
        v = delta * v - LR * g
        x = x + v
        y = x + delta * v
        expected.append((x, y))
    expected = np.array(expected)
    assert_near(own, expected[:, 0])
    assert_near(params, expected[:, 1])


@pytest.mark.parametrize(
    ("build", "value", "other"),
    [
        (lambda xi: with_sgd(jdaso.dasgd(EXCHANGE, 4, 2, xi)), 0.25, 0.0),
        (lambda alpha: with_sgd(jdaso.easgd(EXCHANGE, 4, alpha)), 0.05, 0.3),
        (lambda beta: with_sgd(jdaso.easgd(EXCHANGE, 4, beta=beta)), 0.9, 0.3),
        (lambda mix: with_sgd(jdaso.diloco(EXCHANGE, 4, delay=2, mix=mix)), 0.0, 0.75),
    ],
    ids=["xi", "alpha", "beta", "mix"],
)
def test_the_value_given_is_used_and_may_be_set(build, value, other):
    x, grads = (jnp.asarray(a, jnp.float32) for a in random_run(2, 16, NODES, alike=True))
    tx = inject_hyperparams(build)(value)
    start = jax.vmap(tx.init)(x)
    (name,) = start.hyperparams
    set_to = start._replace(hyperparams={name: jnp.full(NODES, other, jnp.float32)})

    def stepper(tx):
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        # Speed is not tested here, and this compiles less.
        quick = {"xla_backend_optimization_level": 0}
        return jax.jit(jax.vmap(step, axis_name="node"), compiler_options=quick)

    def final(step, state):
        params = x
        for g in grads:
            params, state = step(params, state, g)
        return params

    def close(a, b):
        return np.allclose(a, b, rtol=1e-5, atol=1e-5)  # XLA fuses a traced number differently

    expected, otherwise = (
        final(stepper(build(v)), jax.vmap(build(v).init)(x)) for v in (value, other)
    )
    assert not close(expected, otherwise)
    step = stepper(tx)
    assert close(final(step, start), expected)
    assert close(final(step, set_to), otherwise)


def test_a_concrete_value_is_checked():
    tx = inject_hyperparams(lambda xi: with_sgd(jdaso.dasgd(EXCHANGE, 4, 2, xi)))(1.5)
    with pytest.raises(ValueError, match=r"xi must be in \[0, 1\], got"):
        tx.init(jnp.ones(2))
