"""Blocks divide a tree. The order of the layers is found in the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

from jdaso.passm import order_of_use, partition

sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def sizes_orders_and_counts(draw):
    drawn = draw(sizes)
    order = draw(st.permutations(range(len(drawn))))
    return drawn, order, draw(st.integers(1, len(drawn)))


@given(sizes_orders_and_counts())
def test_blocks_are_a_partition_into_consecutive_layers_of_near_equal_weights(drawn):
    drawn, order, count = drawn
    params = [np.zeros(size, "f4") for size in drawn]
    blocks = partition(params, count, order)
    assert len(blocks) == count
    assert all(blocks)
    assert sorted(i for block in blocks for i in block) == list(range(len(drawn)))
    ranks = [sorted(order.index(i) for i in block) for block in blocks]
    assert [i for rank in ranks for i in rank] == list(range(len(drawn)))
    weights = [sum(drawn[i] for i in block) for block in blocks]
    assert max(abs(w - sum(drawn) / count) for w in weights) <= max(drawn)


def test_a_layer_is_never_divided_and_integers_belong_to_no_block():
    layer = {"bias": np.ones(1), "kernel": np.ones(9)}
    params = {"a": layer, "b": layer, "steps": np.int32(3), "z": np.ones(4)}
    assert partition(params, 2) == [(0, 1), (2, 3, 5)]
    assert partition(params, 3) == [(0, 1), (2, 3), (5,)]
    with pytest.raises(ValueError, match=r"num_blocks must be at most 3, the number of layers"):
        partition(params, 4)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_a_number_of_blocks_is_a_whole_number(count):
    with pytest.raises(ValueError, match="num_blocks must be an integer >= 1"):
        partition([np.ones(2)], count)


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 1, 2]])
def test_an_order_contains_every_leaf_once(order):
    with pytest.raises(ValueError, match="order must contain each of the 2 positions"):
        partition([np.ones(2), np.ones(2)], 2, order)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.relu(linen.Dense(4, name="stem")(x))
        x = jax.jit(linen.tanh)(linen.Dense(4, name="middle")(x))
        return linen.Dense(4, name="head")(x).sum()


def test_the_order_of_layers_is_that_of_the_network_not_of_their_names():
    model = Linen()
    params = model.init(jax.random.key(0), jnp.ones((2, 3)))
    names = [path[1].key for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    order = order_of_use(model.apply, params, jnp.ones((2, 3)))
    assert [names[i] for i in order[::2]] == ["stem", "middle", "head"]
    blocks = partition(params, 3, order)
    assert [{names[i] for i in block} for block in blocks] == [{"stem"}, {"middle"}, {"head"}]


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Linear(3, 4, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        for layer in (self.stem, *self.layers, self.head):
            x = layer(x)
        return x.sum()


def test_layers_of_nnx_are_modules():
    graphdef, params, rest = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, rest, x):
        def model(params, rest, x):
            return nnx.merge(graphdef, params, rest, copy=True)(x)

        return jax.checkpoint(model)(params, rest, x)

    order = order_of_use(loss_fn, params, rest, jnp.ones((2, 3)))
    blocks = partition(params, 4, order)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    names = [{".".join(str(key.key) for key in paths[i][:-2]) for i in block} for block in blocks]
    assert names == [{"stem"}, {"layers.0"}, {"layers.1"}, {"head"}]


def test_data_in_a_closure_hide_the_order():
    data = jnp.ones(3)
    with pytest.raises(ValueError, match="pass the data as arguments"):
        order_of_use(lambda params: (params["w"] * data).sum(), {"w": jnp.ones(3)})


def test_parameters_mixed_among_themselves_are_used_where_they_meet_data():
    def loss_fn(params, x):
        penalty = sum(jnp.sum(leaf**2) for leaf in params)
        half = [leaf.astype(jnp.bfloat16) for leaf in params]
        x = jax.lax.scan(lambda x, w: (x * w, None), x, half[2])[0]
        return (x * half[0]).sum() + penalty

    params = [jnp.ones(1), jnp.ones(1), jnp.ones(3)]
    assert order_of_use(loss_fn, params, jnp.ones(1, jnp.bfloat16)) == [2, 0, 1]
