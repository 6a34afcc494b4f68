"""The mean of gradients, before the optimizer."""

import functools

import golden_family
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import LR, assert_near, both_ways, dyadic_run, few, random_run, train

import jdaso


def run(averaging, x, grads, momentum=None, in_place=False):
    return train(jdaso.chain(optax.sgd(LR, momentum), averaging), x, grads, in_place=in_place)


def expected(x, grads, momentum=0.0, wire=None):
    return x + golden_family.sgd(golden_family.allreduce(grads, wire), LR, momentum).cumsum(axis=0)


@both_ways
@few(max_examples=2)
@given(st.integers(1, 6), st.sampled_from([0.0, 0.9]), st.integers(0, 2**32 - 1))
def test_follows_the_recursion(in_place, nodes, momentum, seed):
    x, grads = random_run(seed, 100, nodes, alike=True)
    averaging = jdaso.allreduce_gradients(jdaso.axis_exchange("node", nodes), wire="float32")
    params, state = run(averaging, x, grads, momentum, in_place=in_place)
    # The same float32 arithmetic as in test_daso.py, without a subtraction per merge.
    assert_near(params, expected(x, grads, momentum))
    assert (params == params[:, :1]).all()  # nodes stay equal, bit for bit
    assert (state.exchanges[-1] == 100).all()


def test_gradients_travel_in_16_bits_by_default():
    # Sums and quotients of four such numbers are exact, so only the wire rounds.
    x, grads = dyadic_run(12, 4)
    x, grads = np.broadcast_to(x[0], x.shape), grads + np.float32(2**-12)  # not a bfloat16 number
    params, _ = run(jdaso.allreduce_gradients(jdaso.axis_exchange("node", 4)), x, grads)
    np.testing.assert_array_equal(params, expected(x, grads, wire="bfloat16"))
    assert (params != expected(x, grads)).any()


def test_a_gradient_that_is_not_finite_is_left_out_of_the_mean():
    x, grads = random_run(0, 20, 3, alike=True)
    grads[7, 1, 2] = np.nan
    averaging = jdaso.allreduce_gradients(jdaso.axis_exchange("node", 3), wire="float32")
    params, state = run(averaging, x, grads, momentum=0.9)
    assert_near(params, expected(x, grads, momentum=0.9))
    assert state.left_out[-1].tolist() == [0, 1, 0]


def test_parameters_are_not_needed():
    averaging = jdaso.allreduce_gradients(jdaso.single_exchange(), wire="float32")
    grads = {"w": jnp.arange(3.0)}
    updates, _ = averaging.update(grads, averaging.init(grads))
    np.testing.assert_array_equal(updates["w"], grads["w"])


@both_ways
@pytest.mark.parametrize("dtypes", [("int32", "float32"), ("float32", "int32")])
def test_a_gradient_of_another_kind_than_its_parameter_is_refused_by_name(in_place, dtypes):
    params, grads = ({"n": jnp.ones(2, dtype), "w": jnp.ones(3)} for dtype in dtypes)
    tx = jdaso.chain(optax.sgd(LR), jdaso.allreduce_gradients(jdaso.single_exchange()))
    step = functools.partial(jdaso.apply_gradients, tx) if in_place else tx.update
    match = rf"got {dtypes[1]} at \"\['n'\]\", where params has {dtypes[0]}: cast"
    with pytest.raises(ValueError, match=match):
        step(grads, tx.init(params), params)
