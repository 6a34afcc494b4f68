"""The classes for flax in the guide on models compute what flax computes."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

import jdaso

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "models.md"


def class_of_guide(name: str) -> type:
    """Executes the block of the guide that defines a class."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    (block,) = (block for block in blocks if f"class {name}(" in block)
    assert len(block.splitlines()) <= 12
    scope = {"jdaso": jdaso}
    exec(block, scope)
    return scope[name]


def test_drain_of_a_state_of_nnx_says_how_to_make_it_pure():
    tx = optimizer()
    of_flax = nnx.Optimizer(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    with pytest.raises(ValueError, match=r"with flax\.nnx, call jdaso\.drain\(tx, nnx\.as_pure\("):
        jdaso.drain(tx, of_flax.opt_state, {"w": jnp.ones(1)})


STEPS, IMAGES = 11, jnp.linspace(-1, 1, 24).reshape(8, 3)


def optimizer():
    averaging = jdaso.dasgd(jdaso.single_exchange(), 4, 2)
    return jdaso.chain(optax.sgd(0.1, momentum=0.9), averaging)


def assert_close(found, expected):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected
    )


def test_train_state_of_the_guide_computes_what_that_of_flax_computes():
    model, tx = linen.Dense(1), optimizer()

    def train(kind, **options):
        params = model.init(jax.random.key(0), IMAGES)
        state = kind.create(apply_fn=model.apply, params=params, tx=tx)

        def step(state):
            grads = jax.grad(lambda p: jnp.mean((state.apply_fn(p, IMAGES) - 1) ** 2))(state.params)
            return state.apply_gradients(grads=grads, **options)

        step = jax.jit(step, donate_argnums=0)
        for _ in range(STEPS):
            state = step(state)
        return state

    mine, flax = train(class_of_guide("TrainState"), value=0.5), train(train_state.TrainState)
    assert int(mine.step) == STEPS
    assert_close((mine.params, mine.opt_state.optimizer), (flax.params, flax.opt_state.optimizer))
    assert float(mine.opt_state.averaging.losses[0]) == 0.5 * STEPS
    assert int(jdaso.metrics(mine.opt_state).exchanges) == 2


def test_nnx_optimizer_of_the_guide_computes_what_that_of_flax_computes():
    tx = optimizer()

    def train(kind):
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        owner = kind(model, tx, wrt=nnx.Param)

        def step(model, owner):
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(IMAGES) - 1) ** 2))(model)
            owner.update(model, grads, value=loss)

        step = nnx.jit(step, donate_argnums=(0, 1))
        for _ in range(STEPS):
            step(model, owner)
        params = nnx.as_pure(nnx.state(model, nnx.Param))
        assert int(owner.step[...]) == STEPS
        return params, nnx.as_pure(owner.opt_state)

    (params, state), (expected, expected_state) = map(
        train, (class_of_guide("Optimizer"), nnx.Optimizer)
    )
    assert_close((params, state.optimizer), (expected, expected_state.optimizer))
    assert int(jdaso.metrics(state).in_flight) == 0
    jdaso.drain(tx, state, params)
