"""Functions on trees of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso.core.tree import division_by, split_state

NUMBERS = np.random.default_rng(1).normal(size=(4, 100_000)).astype(np.float32)


def divided(x, denominator):
    return division_by(denominator)(x)


# With a scalar, a vector of scalars, and a constant, XLA simplifies the program differently.
PROGRAMS = {
    "scalar": lambda n: jax.jit(divided)(NUMBERS, n),
    "under vmap": lambda n: jax.jit(jax.vmap(divided))(NUMBERS, jnp.full(4, n, jnp.float32)),
    "constant": lambda n: jax.jit(lambda x: divided(x, n))(NUMBERS),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("denominator", [2, 3, 7, 100, 1000, 4099])
def test_a_division_is_precise_and_has_no_bias(program, denominator):
    exact = NUMBERS.astype(np.float64) / denominator
    error = (np.float64(PROGRAMS[program](denominator)) - exact) / exact * 2**24
    assert np.abs(error).max() <= 2  # two roundings
    assert abs(error.mean()) < 4 / np.sqrt(error.size)


def outer_merge(*outer):
    return jdaso.diloco(jdaso.single_exchange(), 4, *outer).engine.merge


PARAMS = {"a": jnp.ones((2, 3)), "b": {"c": jnp.ones(4), "n": jnp.arange(2)}}


def test_split_state_finds_all_arrays_and_rebuilds_them():
    init = outer_merge(optax.adam(0.1)).init
    state = init(PARAMS)
    lists, rest, rebuild = split_state(init, state)
    # The anchor, and Adam's m and v; integers are not exchanged. Adam's step count is the rest.
    assert [[x.shape for x in each] for each in lists] == [[(2, 3), (4,)]] * 3
    assert [x.shape for x in rest] == [()]
    rebuilt = rebuild([[x + 1 for x in each] for each in lists], rest)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(state)
    np.testing.assert_array_equal(rebuilt.anchor["b"]["c"], 2 * np.ones(4))


def test_a_part_of_a_state_has_the_leaves_of_the_part():
    init = outer_merge().init
    lists, rest, rebuild = split_state(init, init(PARAMS))
    of_second = rebuild([each[1:] for each in lists], rest, slice(1, 2))
    assert [x.shape for x in jax.tree.leaves(of_second)] == [(4,)] * 2
    assert isinstance(of_second.anchor["a"], optax.MaskedNode)
