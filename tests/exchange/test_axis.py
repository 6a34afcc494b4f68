"""The program of an exchange along an axis does not grow with the parameters."""

import jax
import jax.numpy as jnp
import pytest

import jdaso


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_leaves_of_more_than_2_to_the_31_numbers_are_lowered_without_large_constants(wire):
    tx = jdaso.dasgd(jdaso.axis_exchange("node", 2), 4, 3, wire=wire)
    shapes = {"long": (2, 2**31 + 8), "matrix": (2, 2**16 + 1, 2**15), "small": (2, 3)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = jax.eval_shape(jax.vmap(tx.init), params)
    step = jax.jit(jax.vmap(tx.update, axis_name="node"))
    assert len(step.lower(params, state, params).as_text()) < 1e6
