"""Helpers of the algorithms."""

import jax.numpy as jnp
import pytest

from jdaso.algorithms.defaults import mix_leaves


@pytest.mark.parametrize("own", [0, 0.0, jnp.float32(0)])
def test_a_weight_of_zero_gives_the_mean_even_where_own_numbers_are_not_finite(own):
    (mixed,) = mix_leaves(own, [jnp.array([jnp.inf, jnp.nan, 3.0])], [jnp.array([1.0, 2.0, 5.0])])
    assert mixed.tolist() == [1, 2, 5]


def test_other_weights_mix():
    (mixed,) = mix_leaves(0.25, [jnp.array([4.0])], [jnp.array([8.0])])
    assert mixed.tolist() == [7]
