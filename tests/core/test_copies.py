"""Optimizers can be copied as those of optax, and copies share the exchange."""

import copy
import pickle

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jdaso

PARAMS = {"w": jnp.arange(3.0)}
GRADS = {"w": jnp.ones(3)}


def local_exchange():
    return jdaso.single_exchange()


def live_exchange():
    """As those over MPI."""
    exchange = local_exchange()
    exchange.may_pickle = False
    return exchange


MAKERS = {
    "averaging": lambda exchange: jdaso.dasgd(exchange, 2, 1),
    "chain": lambda exchange: jdaso.chain(optax.adam(0.1), jdaso.dasgd(exchange, 2, 1), "average"),
    "eamsgd": lambda exchange: jdaso.eamsgd(exchange, 2, 0.1, 0.9),
    "optax.chain": lambda exchange: optax.chain(optax.sgd(0.1), jdaso.dasgd(exchange, 2, 1)),
}


def train(tx):
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(5):
        updates, state = tx.update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_same(tx, other):
    jax.tree.map(np.testing.assert_array_equal, train(tx), train(other))


@pytest.mark.parametrize("exchange", [local_exchange, live_exchange])
@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_does_the_same_and_shares_the_exchange(name, exchange):
    tx = MAKERS[name](exchange())
    for made in (copy.copy(tx), copy.deepcopy(tx), copy.deepcopy({"tx": [tx]})["tx"][0]):
        assert_same(made, tx)
        if name != "optax.chain":
            assert made.exchange is tx.exchange


@pytest.mark.parametrize("name", MAKERS)
def test_pickled_where_no_connection_is_lost(name):
    tx = MAKERS[name](local_exchange())
    made = cloudpickle.loads(cloudpickle.dumps(tx))
    assert_same(made, tx)
    if name != "optax.chain":
        with made.exchange:
            pass


@pytest.mark.parametrize("dumps", [cloudpickle.dumps, pickle.dumps])
@pytest.mark.parametrize("name", MAKERS)
def test_a_connection_cannot_be_pickled(name, dumps):
    exchange = live_exchange()
    with pytest.raises(TypeError, match=r"connects processes.* cannot be pickled.*Checkpoints"):
        dumps(exchange)
    tx = MAKERS[name](exchange)
    if name == "optax.chain" and dumps is pickle.dumps:
        return  # optax's functions are local, which pickle says before it comes to ours
    with pytest.raises(TypeError, match=r"connects processes.* cannot be pickled.*Checkpoints"):
        dumps(tx)


def test_copies_of_what_holds_an_optimizer():
    exchange = live_exchange()
    tx = MAKERS["chain"](exchange)
    state = TrainState.create(apply_fn=lambda x: x, params=PARAMS, tx=tx)
    made = copy.deepcopy(state).apply_gradients(grads=GRADS)
    jax.tree.map(
        np.testing.assert_array_equal, made.params, state.apply_gradients(grads=GRADS).params
    )
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    other = copy.deepcopy(optimizer)
    assert other.tx.exchange is exchange
    grads = nnx.state(model, nnx.Param)
    other.update(nnx.clone(model), grads)
    assert optimizer.step.get_value() == 0
    optimizer.update(model, grads)


def test_an_optimizer_in_a_tree_is_no_part_of_its_arrays():
    tx = MAKERS["chain"](local_exchange())
    assert jax.tree.map(lambda x: x, {"tx": tx})["tx"] is tx
    state = tx.init(PARAMS)

    @eqx.filter_jit
    def step(tx, params, state):
        return jdaso.apply_gradients(tx, GRADS, state, params)

    jax.tree.map(
        np.testing.assert_array_equal,
        step(tx, PARAMS, state)[0],
        jdaso.apply_gradients(tx, GRADS, state, PARAMS)[0],
    )


@pytest.mark.parametrize("name", ["averaging", "chain", "eamsgd"])
def test_an_optimizer_with_another_init(name):
    tx = MAKERS[name](local_exchange())
    seen = []

    def init(params):
        seen.append(params)
        return tx.init(params)

    made = tx._replace(init=init)
    assert_same(made, tx)
    assert len(seen) == 1
    assert (made.exchange, made.state_type, made.engine) == (tx.exchange, tx.state_type, tx.engine)
    jdaso.drain(made, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("name", ["averaging", "chain", "eamsgd"])
def test_an_optimizer_with_another_update_is_not_used_by_what_would_not_call_it(name):
    tx = MAKERS[name](local_exchange())
    seen = []

    def update(updates, state, params=None, **extra_args):
        seen.append(params)
        return tx.update(updates, state, params, **extra_args)

    made = tx._replace(update=update)
    assert_same(made, tx)
    assert seen
    with pytest.raises(ValueError, match=r"call tx\.update and optax\.apply_updates"):
        jdaso.apply_gradients(made, GRADS, made.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"what _replace\(update=...\) has made of it"):
        jdaso.chain(optax.sgd(0.1), made)
    jdaso.drain(made, made.init(PARAMS), PARAMS)
