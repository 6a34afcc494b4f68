"""The final model of a training keeps parameters and batch statistics, on the first node only."""

import types

import final_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jdaso


def network(seed):
    rngs = nnx.Rngs(seed)
    return nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))


def state_of(model):
    return nnx.split(model, nnx.Param, nnx.BatchStat)[1:]


def test_parameters_and_batch_statistics_are_read_back(tmp_path):
    trained = network(0)
    trained(jnp.arange(15.0).reshape(5, 3))  # changes the batch statistics
    final_model.save(tmp_path, jdaso.discover_topology(), *state_of(network(1)))
    final_model.save(tmp_path, jdaso.discover_topology(), *state_of(trained))  # replaces it
    for like in (network(2), nnx.eval_shape(lambda: network(2))):
        read = state_of(final_model.load(tmp_path, like))
        jax.tree.map(np.testing.assert_array_equal, read, state_of(trained))


def test_other_nodes_write_nothing(tmp_path):
    second = types.SimpleNamespace(node=1, joined=False, local_rank=0)
    final_model.save(tmp_path, second, *state_of(network(0)))
    assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match="model does not exist"):
        final_model.load(tmp_path, network(0))
