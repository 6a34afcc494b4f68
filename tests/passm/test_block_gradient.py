"""The subgradient of a block equals that of the whole model and costs fewer operations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from passm_problem import batch, first_params, loss_fn

from jdaso.passm import order_of_use, partition, restricted_value_and_grad

LAYERS, WIDTH, BATCH = 8, 256, 8


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_it_is_the_block_of_the_whole_gradient(num_blocks):
    params, data = first_params(), batch(0, 0)
    blocks = partition(params, num_blocks)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(params, *data)
    for block in blocks:
        value, restricted = jax.jit(restricted_value_and_grad(loss_fn, block))(params, *data)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        leaves = jax.tree.leaves(restricted, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
        for i, whole in enumerate(jax.tree.leaves(grads)):
            if i in block:
                np.testing.assert_allclose(leaves[i], whole, rtol=1e-5, atol=1e-6)
            else:
                assert isinstance(leaves[i], optax.MaskedNode)


def test_aux_is_returned():
    def with_aux(params, x):
        return params["a"] * params["b"] * x, {"seen": x}

    call = restricted_value_and_grad(with_aux, (0,), has_aux=True)
    (loss, aux), grads = call({"a": jnp.float32(2), "b": jnp.float32(3)}, 5.0)
    assert (float(loss), aux, float(grads["a"])) == (30, {"seen": 5.0}, 15)


def operations(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def test_layers_below_a_block_have_no_backward_pass():
    """Half of the F operations of a backward pass are for weights, half for activations.

    The block next to the input needs the subgradients of all activations, except the input of the
    first layer, and of 1/c of the weights. Each further block needs 1/c fewer activations. The
    paper does not separate the two (Appendix D). Its saving, F (c - 1) / 2, is smaller. XLA counts
    the operations here.
    """
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(LAYERS)]
    x = jnp.ones((BATCH, WIDTH))

    def loss_fn(params, x):
        for w in params:
            x = jnp.maximum(x @ w, 0)
        return x.sum()

    # ReLU takes one or two per cent of the operations of the products.
    product, c = 2 * BATCH * WIDTH * WIDTH, 4
    blocks = partition(params, c, order_of_use(loss_fn, params, x))
    forward = operations(loss_fn, params, x)
    full = operations(jax.value_and_grad(loss_fn), params, x) - forward
    own = [operations(restricted_value_and_grad(loss_fn, b), params, x) - forward for b in blocks]
    assert full == pytest.approx(product * (2 * LAYERS - 1), rel=0.03)
    per_block = LAYERS // c
    for number, backward in enumerate(own):
        below = number * per_block
        needed = (LAYERS - below - 1) + per_block  # of activations, of weights
        assert backward == pytest.approx(product * needed, rel=0.03)
    assert c * full - sum(own) > full * (c - 1) / 2
