"""Merge rules that are declared leafwise merge some of the leaves as they merge all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso.core import Arrival
from jdaso.core.tree import split_state

PARAMS = {"a": jnp.arange(6.0).reshape(2, 3), "b": {"c": jnp.ones(4), "n": jnp.arange(2)}}
LEAVES = [PARAMS["a"], PARAMS["b"]["c"]]
EXCHANGE = jdaso.single_exchange()
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.7))


near = functools.partial(np.testing.assert_allclose, rtol=1e-6)  # XLA rounds vectors differently


def diloco(outer):
    return jdaso.diloco(EXCHANGE, 4, outer, delay=1, mix=0.5)


RULES = {
    "daso": jdaso.daso(EXCHANGE, 4, 2),
    "dasgd": jdaso.dasgd(EXCHANGE, 4, 2),
    "local_sgd": jdaso.local_sgd(EXCHANGE, 4),
    "delta": jdaso.local_sgd(EXCHANGE, schedule=jdaso.constant(4, 2), merge="delta"),
    "easgd": jdaso.easgd(EXCHANGE, 4),
    "diloco, nesterov": diloco(optax.sgd(0.7, momentum=0.9, nesterov=True)),
    "diloco, adam": diloco(optax.adam(0.1)),
}


def arrival(leaves):
    total = [3 * x + 1 for x in leaves]
    mean = [t / 2 for t in total]
    return Arrival(total, mean, jnp.float32(2), jnp.int32(1), jnp.bool_(True))


@pytest.mark.parametrize("name", RULES)
def test_a_part_of_the_leaves_is_merged_as_all_of_them_are(name):
    rule = RULES[name].engine.merge
    assert rule.leafwise
    state = rule.init(PARAMS)
    for _ in range(2):  # the second merge reads what the first has written to the state
        lists, rest, rebuild = split_state(rule.init, state)
        merged, state = rule.merge(LEAVES, arrival(LEAVES), state)
        new_lists, new_rest, _ = split_state(rule.init, state)
        for j in range(len(LEAVES)):
            part = slice(j, j + 1)
            own = rebuild([each[part] for each in lists], rest, part)
            of_part, of_state = rule.merge(LEAVES[part], arrival(LEAVES[part]), own)
            near(of_part[0], merged[j])
            found, found_rest, _ = split_state(rule.init, of_state)
            assert len(found) == len(new_lists)
            jax.tree.map(near, found, [each[part] for each in new_lists])
            jax.tree.map(near, found_rest, new_rest)


def test_an_outer_optimizer_that_reads_all_leaves_is_not_leafwise():
    assert not diloco(CLIPPED).engine.merge.leafwise
