"""Functions on trees of arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdaso.core.tree import division_by

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


def test_products_with_a_rounded_reciprocal_have_a_bias():
    exact = NUMBERS.astype(np.float64) / 3
    error = (NUMBERS * (np.float32(1) / np.float32(3)) - exact) / exact * 2**24
    assert abs(error.mean()) > 100 / np.sqrt(error.size)
