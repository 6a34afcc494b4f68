"""The engine together with optax transformations, wrappers and model libraries."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jdaso
from jdaso.core.exchange import changed

EXACT = {"wire": "float32", "blocking_wire": "float32"}
# Warm-up, cycling with plateaus, cool-down in 40 steps.
PHASES = {"period": 4, "warmup": 4, "cooldown": 4, "total": 40, "epoch": 4, "patience": 0}


def alone(schedule=None):
    """DASO on one node. With a delay, x <- (2 S x + x(t)) / (2 S + 1), not the identity."""
    return jdaso.daso(jdaso.single_exchange(), schedule=schedule or jdaso.constant(2, 1), **EXACT)


def merged_once(x0, updates):
    """x after three constant updates u under ``alone()``: x_1 = x0 + 2u arrives one step late."""
    posted, now = x0 + 2 * updates, x0 + 3 * updates
    return (2 * 1 * now + posted) / (2 * 1 + 1)


def same_structure(a, b):
    def signature(x):
        return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), x)

    return signature(a) == signature(b)


def test_between_exchanges_updates_pass_bit_for_bit():
    """Posting must not add updates to parameters and subtract them again, which would lose bits."""
    tx = alone(jdaso.constant(4, 2))
    params = jax.random.normal(jax.random.key(0), (1000,))
    updates = jax.random.normal(jax.random.key(1), (1000,)) * 1e-6
    state, unchanged, update = tx.init(params), [], jax.jit(tx.update)
    for _ in range(12):
        out, state = update(updates, state, params)
        unchanged.append(bool((out == updates).all()))
    # Posted after steps 3, 7 and 11, merged after steps 5 and 9.
    assert [t for t in range(12) if not unchanged[t]] == [5, 9]


def test_works_as_the_last_of_a_chain():
    tx = optax.chain(optax.clip(1.0), optax.scale(-0.1), alone())
    params = {"w": jnp.full(2, 5.0)}
    state = tx.init(params)
    for _ in range(3):
        updates, state = tx.update({"w": jnp.full(2, 7.0)}, state, params, value=1.0)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params["w"], merged_once(5.0, -0.1), rtol=1e-6)  # float32


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.relu(nn.Dense(4)(x)))


def test_flax_linen_train_state_which_forwards_no_value():
    model = Linen()
    params = model.init(jax.random.key(0), jnp.ones((1, 3)))
    tx = optax.chain(optax.sgd(0.1), alone(jdaso.cycling(**PHASES)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    x = jnp.ones((8, 3))

    @jax.jit
    def train_step(state):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(
            state.params
        )
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(20):
        state, loss = train_step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.1 * losses[0]
    seen = jdaso.core.averaging_state(state.opt_state)
    assert int(seen.plan.period) == 4  # no value, no plateau
    assert int(seen.exchanges) == 4 + 16 // 4  # at every step of warm-up, then at every fourth


def test_flax_nnx_optimizer():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(optax.sgd(0.1), alone()), wrt=nnx.Param)
    before = jnp.copy(model.kernel[...])

    @nnx.jit
    def train_step(model, optimizer):
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads, value=1.0)

    for _ in range(3):
        train_step(model, optimizer)
    expected = merged_once(before, -0.1)
    np.testing.assert_allclose(model.kernel[...], expected, atol=1e-6)  # float32, numbers near 1


def test_flax_nnx_split_into_a_pure_step():
    graphdef, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Param)
    tx = optax.chain(optax.sgd(0.1), alone())
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: nnx.merge(graphdef, p)(jnp.ones(3))[0] ** 2)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        params, state = step(params, state)
    assert abs(float(nnx.merge(graphdef, params)(jnp.ones(3))[0])) < 0.1


def test_equinox_with_none_for_what_is_not_trained():
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))  # contains functions and arrays
    params, static = eqx.partition(model, eqx.is_inexact_array)
    assert any(leaf is None for leaf in jax.tree.leaves(params, is_leaf=lambda x: x is None))
    tx = optax.chain(optax.sgd(0.1), alone())
    state = tx.init(params)

    @eqx.filter_jit
    def step(params, state):
        grads = eqx.filter_grad(lambda p: eqx.combine(p, static)(jnp.ones(3))[0] ** 2)(params)
        updates, state = tx.update(grads, state, params, value=1.0)
        return eqx.apply_updates(params, updates), state

    first = abs(float(model(jnp.ones(3))[0]))
    for _ in range(20):
        params, state = step(params, state)
    assert abs(float(eqx.combine(params, static)(jnp.ones(3))[0])) < 0.1 * first


def test_parameters_may_be_a_single_array_or_nested():
    for params in (jnp.ones(3), [jnp.ones(1), (jnp.ones(2), {"a": jnp.ones(())})]):
        tx = alone()
        state = tx.init(params)
        updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), state, params)
        assert same_structure(updates, params)


def test_mixed_dtypes_stay_and_integers_are_untouched():
    params = {
        "f32": jnp.full(2, 3.0),
        "bf16": jnp.full(2, 3.0, jnp.bfloat16),
        "f16": jnp.full(2, 3.0, jnp.float16),
        "count": jnp.full(2, 3, jnp.int32),
        "mask": jnp.array([True, False]),
    }
    nodes = 4
    exchange = jdaso.axis_exchange("node", nodes)
    tx = jdaso.daso(exchange, 1, 0, **EXACT)

    def step(number):
        # Node i moves by i. Integers and booleans get a zero of their own dtype.
        updates = jax.tree.map(
            lambda p: (
                jnp.zeros_like(p)
                if not jnp.issubdtype(p.dtype, jnp.floating)
                else jnp.full_like(p, number)
            ),
            params,
        )
        updates, _ = tx.update(updates, tx.init(params), params)
        return updates, optax.apply_updates(params, updates)

    updates, moved = jax.jit(jax.vmap(step, axis_name="node"))(jnp.arange(float(nodes)))
    for name in ("f32", "bf16", "f16"):  # 3 + (0 + 1 + 2 + 3) / 4 has few bits and is exact
        assert updates[name].dtype == moved[name].dtype == params[name].dtype
        assert (moved[name] == 4.5).all()
    for name in ("count", "mask"):
        assert (moved[name] == params[name]).all()


def test_a_tree_without_floats_has_nothing_to_average():
    with pytest.raises(ValueError, match="at least one floating-point leaf"):
        alone().init({"n": jnp.arange(3)})


def test_params_are_required():
    tx = alone()
    with pytest.raises(ValueError, match=r"daso moves parameters.*params"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


ALGORITHMS = {
    "daso": lambda exchange: jdaso.daso(exchange, 4, 2),
    "daso int8": lambda exchange: jdaso.daso(exchange, 4, 2, wire="int8"),
    "easgd": lambda exchange: jdaso.easgd(exchange, period=4),
    "diloco": lambda exchange: jdaso.diloco(exchange, period=4),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_programs_grow_as_the_number_of_leaves_does(algorithm):
    """XLA must not copy a reduction over all leaves into each use, or it compiles for minutes."""
    exchange = changed(jdaso.single_exchange(), compares=True)

    def size(leaves):
        params = [jnp.ones(3)] * leaves
        tx = optax.chain(optax.sgd(0.1, momentum=0.9), ALGORITHMS[algorithm](exchange))
        update = jax.jit(tx.update).lower(params, tx.init(params), params)
        return len(update.compile().as_text())

    assert size(32) < 2.0 * size(16)


def test_a_program_contains_the_merge_once_unless_some_delays_are_zero_and_others_are_not():
    def size(schedule):
        params = [jnp.ones(3)] * 32
        tx = jdaso.chain(optax.sgd(0.1), alone(schedule))
        step = jax.jit(functools.partial(jdaso.apply_gradients, tx))
        return len(step.lower(params, tx.init(params), params).as_text())

    late, blocking = (jdaso.constant(4, delay) for delay in (1, 0))
    both = size(late._replace(may_block=True))
    assert max(size(late), size(blocking)) < 0.9 * both


def test_a_schedule_without_delays_does_not_merge_what_another_one_has_posted():
    """The exchange counts as left out. Draining the first schedule would have merged it."""
    params = {"w": jnp.ones(3)}
    late, blocking = (
        jdaso.chain(optax.sgd(0.1), alone(jdaso.constant(4, delay))) for delay in (2, 0)
    )
    state = late.init(params)
    for tx, steps in ((late, 4), (blocking, 8)):
        for _ in range(steps):
            params, state = jdaso.apply_gradients(tx, params, state, params)
    numbers = jdaso.metrics(state)
    assert (int(numbers.left_out), int(numbers.exchanges)) == (1, 3)


def test_averaging_state_needs_exactly_one():
    tx = alone()
    state = tx.init(jnp.ones(2))
    assert jdaso.core.averaging_state(((state,), 3)) is state
    for states in ((), (state, state)):
        with pytest.raises(ValueError, match=f"holds {len(states)} states"):
            jdaso.core.averaging_state(states)


def test_an_optimizer_with_momentum_recovers_when_it_is_protected_by_itself():
    """As the guides advise. Otherwise the momentum stays NaN, and every later step is skipped."""
    optimizer = optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 10)
    tx = optax.chain(optimizer, jdaso.daso(jdaso.axis_exchange("node", 3), 4, 2))

    @jax.jit
    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.ones((3, 2))
    state = jax.vmap(tx.init)(params)
    for t in range(24):
        grads = jnp.ones((3, 2)).at[1].set(jnp.nan if t == 5 else 1.0)
        params, state = step(params, state, grads)
    averaging = jdaso.core.averaging_state(state)
    assert jnp.isfinite(params).all()
    assert averaging.skipped.tolist() == averaging.left_out.tolist() == [0, 0, 0]
    assert averaging.exchanges.tolist() == [6, 6, 6]
    # The node has missed one of 24 steps, and the means have reduced the difference.
    assert float(jnp.abs(params[1] - params[0]).max()) < 0.02 * float(jnp.abs(params[0]).max())
