"""The subgradient of a block is that of the whole model, and costs less."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problem import batch, first_params, loss_fn

from jdaso.passm import order_of_use, partition, restricted_value_and_grad

LAYERS, WIDTH, BATCH = 8, 256, 8


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_it_is_the_whole_gradients_block(num_blocks):
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


def test_aux_comes_along():
    def with_aux(params, x):
        return params["a"] * params["b"] * x, {"seen": x}

    call = restricted_value_and_grad(with_aux, (0,), has_aux=True)
    (loss, aux), grads = call({"a": jnp.float32(2), "b": jnp.float32(3)}, 5.0)
    assert (float(loss), aux, float(grads["a"])) == (30, {"seen": 5.0}, 15)


def operations(function, *args):
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


def test_layers_below_a_block_have_no_backward_pass():
    """Of XLA's count: F/2 of a backward pass are subgradients of weights, F/2 of activations.

    The block next to the input needs all of the second kind (but those of the very first layer's
    input) and 1/c of the first kind; each further block 1/c less of the second. The paper counts
    neither apart (Appendix D); it saves F (c - 1) / 2, which is less.
    """
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)), jnp.float32) for _ in range(LAYERS)]
    x = jnp.ones((BATCH, WIDTH))

    def loss_fn(params, x):
        for w in params:
            x = jnp.maximum(x @ w, 0)
        return x.sum()

    # The rest of the operations, of ReLU, are one or two per cent of those of products.
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
