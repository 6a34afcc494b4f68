"""The training step of processes that share one model."""

import dataclasses

import config
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
import pytest
from data import Dataset, Split
from flax import nnx
from shared_model import SharedModel, switches
from steps import Task, TrainState, make_steps

import jdaso

STEPS = 5
KEYS = {"epochs": 8, "warmup_epochs": 0, "weight_decay": 0.01}


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Linear(4, 5, rngs=rngs)
        self.norm = nnx.BatchNorm(5, axis_name="local", rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, x, train):
        return self.head(nnx.relu(self.norm(self.stem(x), use_running_average=not train)))


def load(index, rng):
    return np.random.default_rng(index).normal(size=4).astype("f4"), np.int32(index % 3)


def loss(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def configured(**keys):
    return config.complete(dataclasses.replace(config.Config(), **KEYS | keys))


def task():
    split = Split(64, load)
    return Task(Dataset(split, split, 3, 1), Model(), loss, lambda *_: None, lambda _: {})


def begin():
    _, params, stats = nnx.split(Model(), nnx.Param, nnx.BatchStat)
    return TrainState(params, stats, (), jnp.zeros(2))


def batch(step):
    images, labels = zip(*(load(8 * step + i, None) for i in range(8)), strict=True)
    return np.stack(images), np.stack(labels)


def rate(step):
    return np.float32(0.1 / (1 + step))


@pytest.mark.parametrize("sync", ["assm", "passm"])
def test_one_process_trains_as_sgd_does(sync):
    """Learning rates, decay and batch statistics are the same, and the block is the whole model."""
    topology = jdaso.discover_topology()
    shared = SharedModel(configured(sync=sync), task(), topology, 1)
    state = begin()
    state = state._replace(opt_state=shared.init(state))
    optimizer = optimizers.create(configured(sync="none"), jdaso.single_exchange(), 1)
    train_step, _ = make_steps(task(), optimizer, topology)
    plain = begin()
    plain = plain._replace(opt_state=optimizer.init(plain.params))
    for step in range(STEPS):
        state, found, metrics = shared.train_step(state, rate(step), *batch(step))
        plain, expected, _ = train_step(plain, rate(step), *batch(step))
        assert float(found) == pytest.approx(float(expected), rel=1e-5)
    assert (metrics.step, metrics.skipped) == (STEPS, 0)
    state = shared.settled(state)
    for x, y in zip(jax.tree.leaves(state[:2]), jax.tree.leaves(plain[:2]), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state.losses, plain.losses, rtol=1e-5)


def test_a_training_goes_on_from_the_parameters_of_its_state():
    """A checkpoint may have replaced the parameters that the model was created with."""
    shared = SharedModel(configured(sync="assm"), task(), jdaso.discover_topology(), 1)
    state = begin()
    own = shared.init(state)
    state = state._replace(opt_state=own, params=jax.tree.map(lambda x: x + 1, state.params))
    assert shared.settled(state) is state
    after, _, _ = shared.train_step(state, np.float32(0), *batch(0))
    for x, y in zip(
        *map(jax.tree.leaves, (shared.settled(after).params, state.params)), strict=True
    ):
        np.testing.assert_array_equal(x, y)


def test_another_number_of_processes_than_asked_for_is_named():
    with pytest.raises(ValueError, match="processes: 4 were requested, but the launcher started 1"):
        SharedModel(configured(sync="passm", processes=4), task(), jdaso.discover_topology(), 1)


def test_switches_are_epochs_or_those_of_the_heuristic():
    assert switches(configured(sync="passm_plus", switches=(2, 5)), 10) == [20, 50]
    drops = {"decay": "step", "decay_epochs": (4, 6), "epochs": 8}
    assert switches(configured(sync="passm_plus", **drops), 10) == [20, 36, 44, 56, 64]
    assert switches(configured(sync="passm_plus"), 10) == [20]
