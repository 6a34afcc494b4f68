"""Large arrays are rounded to the wire inside a compiled program, where XLA would keep more bits.

XLA may compute a conversion to a narrower dtype and back as no conversion. On CPUs it does so for
arrays of about 2000 elements and more, with and without optimizations.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdaso
from jdaso.core import averaging_state

SIZE, LR = 12_000, 2.0**-6
WIRES = ("bfloat16", "float16")
BLOCKING = jdaso.cycling(period=4, warmup=10, cooldown=10, total=100)
pytestmark = pytest.mark.usefixtures("optimized")


def numbers(nodes, low=1.0, seed=0):
    """Numbers of 13 bits in [low, 2 low), so that sums of a few of them are exact in float32."""
    rng = np.random.default_rng(seed)
    return np.float32(low * (1 + rng.integers(0, 2**12, (nodes, SIZE)) / 2**12))


def rounded(x, dtype):
    return np.asarray(x, np.float32).astype(jnp.dtype(dtype)).astype(np.float32)


def received(x, wire):
    """What every node receives in place of the sum of ``x`` over its first axis."""
    nodes = len(x) if wire == "float16" else 1  # float16 sends the mean, which cannot overflow
    return rounded(rounded(x, wire).sum(0) / nodes, wire) * nodes


def one_step(averaging, x, grads=None, value=None):
    """Parameters and state after one step of SGD on a virtual cluster."""
    tx = jdaso.chain(optax.sgd(LR), averaging)
    grads = jnp.zeros_like(x) if grads is None else grads

    @jax.jit
    @functools.partial(jax.vmap, axis_name="node")
    def step(params, state, grads):
        return jdaso.apply_gradients(tx, grads, state, params, value=value)

    params, state = step(x, jax.vmap(tx.init)(x), grads)
    return np.asarray(params), averaging_state(state)


def axis(nodes):
    return jdaso.axis_exchange("node", nodes)


def test_a_bfloat16_wire_makes_1_of_4096_numbers_of_1_001():
    x = jnp.full((2, 4096), 1.001)
    params, _ = one_step(jdaso.local_sgd(axis(2), period=1, wire="bfloat16"), x)
    assert np.unique(params).tolist() == [1.0]


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("wire", WIRES)
def test_parameters_and_their_sum_are_rounded_to_the_wire(nodes, wire):
    x = numbers(nodes)
    exchange = axis(nodes) if nodes > 1 else jdaso.single_exchange()
    params, _ = one_step(jdaso.local_sgd(exchange, period=1, wire=wire), x)
    sent = received(x, wire) if nodes > 1 else rounded(x[0], wire)
    np.testing.assert_allclose(params, np.broadcast_to(sent / nodes, x.shape), rtol=2e-7)


def test_what_a_delta_merge_subtracts_is_rounded_to_the_wire():
    x = numbers(3)
    averaging = jdaso.local_sgd(axis(3), 1, 0, "delta", wire="bfloat16")
    expected = x + received(x, "bfloat16") / 3 - rounded(x, "bfloat16")
    np.testing.assert_allclose(one_step(averaging, x)[0], expected, rtol=2e-7)


def test_blocking_phases_of_daso_round_to_bfloat16():
    x = numbers(2)
    params, _ = one_step(jdaso.daso(axis(2), schedule=BLOCKING), x)
    np.testing.assert_array_equal(params, np.broadcast_to(received(x, "bfloat16") / 2, x.shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_allreduce_gradients_rounds_gradients_and_their_sum_to_bfloat16(dtype):
    grads = numbers(2)
    given = (jnp.asarray(grads) * jnp.ones((), dtype)).astype(dtype)
    params, _ = one_step(jdaso.allreduce_gradients(axis(2)), np.zeros_like(grads), given)
    expected = np.broadcast_to(-LR * received(grads, "bfloat16") / 2, grads.shape)
    np.testing.assert_array_equal(params, expected)


def test_gradients_of_bfloat16_are_rounded_where_the_step_computes_them():
    """Between the gradient's cast and the exchange there is no other operation."""
    grads, tx = numbers(2), jdaso.allreduce_gradients(axis(2))

    @jax.jit
    @functools.partial(jax.vmap, axis_name="node")
    def mean(g):
        g = g.astype(jnp.bfloat16)
        return tx.update(g, tx.init(g))[0].astype(jnp.float32)

    expected = rounded(received(grads, "bfloat16") / 2, "bfloat16")
    np.testing.assert_array_equal(mean(grads), np.broadcast_to(expected, grads.shape))


def test_consensus_rounds_the_sum_and_the_mean_of_bfloat16_parameters():
    x = rounded(numbers(3), "bfloat16")
    given = jnp.asarray(x, jnp.bfloat16)
    run = functools.partial(jdaso.consensus, axis(3))
    mean = jax.jit(lambda x: jax.vmap(run, axis_name="node")(x).astype(jnp.float32))(given)
    exact = rounded(x.sum(0), "bfloat16") / np.float32(3)
    np.testing.assert_array_equal(mean, np.broadcast_to(rounded(exact, "bfloat16"), x.shape))


@pytest.mark.parametrize("nodes", [2, 3])
def test_two_steps_of_bfloat16_parameters_in_one_program_equal_two_programs(nodes):
    """The merge of the first step returns bfloat16, which the second step widens."""
    x = jnp.asarray(numbers(nodes), jnp.bfloat16)
    grads = jnp.asarray(numbers(nodes, seed=1), jnp.bfloat16)
    tx = jdaso.chain(optax.sgd(LR), jdaso.daso(axis(nodes), schedule=BLOCKING))

    @functools.partial(jax.jit, static_argnums=3)
    @functools.partial(jax.vmap, axis_name="node", in_axes=(0, 0, 0, None))
    def run(params, state, grads, steps):
        for _ in range(steps):
            params, state = jdaso.apply_gradients(tx, grads, state, params)
        return params, state

    start = x, jax.vmap(tx.init)(x)
    together, _ = run(*start, grads, 2)
    apart, _ = run(*run(*start, grads, 1), grads, 1)
    np.testing.assert_array_equal(together, apart)


@pytest.mark.parametrize("wire", WIRES)
def test_the_residual_is_what_a_blocking_wire_rounds_off(wire):
    x = numbers(2)
    averaging = jdaso.daso(axis(2), schedule=BLOCKING, wire="int8", blocking_wire=wire)
    params, state = one_step(averaging, x)
    [residual] = state.fragments[0].feedback.residual
    np.testing.assert_array_equal(residual, x - rounded(x, wire))
    assert np.abs(residual).max() > 0
    np.testing.assert_array_equal(params, np.broadcast_to(received(x, wire) / 2, x.shape))


@pytest.mark.parametrize("low", [2.0**-20, 2.0**-25, 0.9 * 2**15])
def test_a_float16_wire_keeps_small_and_large_numbers_as_a_cast_does(low):
    """Below 2^-14 float16 has fewer bits, and below 2^-25 none."""
    x = numbers(4, low)
    params, state = one_step(jdaso.local_sgd(axis(4), period=1, wire="float16"), x)
    expected = np.broadcast_to(received(x, "float16") / 4, x.shape)
    np.testing.assert_array_equal(params, expected)
    assert np.asarray(state.left_out).tolist() == [0] * 4


def test_a_node_with_a_number_too_large_for_float16_is_left_out():
    x = numbers(3)
    x[1, 5] = 65520.0  # the smallest number that float16 rounds to infinity
    params, state = one_step(jdaso.local_sgd(axis(3), period=1, wire="float16"), x)
    assert np.asarray(state.left_out).tolist() == [0, 1, 0]
    mean = rounded(rounded(x[[0, 2]], "float16").sum(0) / 3, "float16") * 3 / 2
    np.testing.assert_allclose(params, np.broadcast_to(mean, x.shape), rtol=2e-7)


@pytest.mark.parametrize("nodes", [1, 2])
def test_float64_parameters_are_rounded_to_float32(nodes):
    with jax.enable_x64(True):
        x = 1 + np.random.default_rng(2).random((nodes, SIZE))
        exchange = axis(nodes) if nodes > 1 else jdaso.single_exchange()
        params, _ = one_step(jdaso.local_sgd(exchange, period=1, wire="float32"), jnp.asarray(x))
        sent = x.astype(np.float32).sum(0).astype(np.float64) / nodes
        np.testing.assert_allclose(params, np.broadcast_to(sent, x.shape), rtol=1e-12)


@pytest.mark.parametrize("wire", ["int8", "float4"])
def test_delta_merges_of_blocks_keep_the_mean_of_the_nodes(wire):
    steps = np.random.default_rng(0).standard_normal((20, 4, 512)).astype(np.float32)
    averaging = jdaso.local_sgd(jdaso.axis_exchange("node", 4), 2, 1, "delta", wire=wire)
    tx = optax.chain(optax.sgd(1.0), averaging)
    params = jnp.zeros((4, 512))
    state = jax.vmap(tx.init)(params)
    step = jax.jit(jax.vmap(tx.update, axis_name="node"))
    for gradients in steps * np.geomspace(1e-3, 1, 512, dtype=np.float32):
        updates, state = step(gradients, state, params)
        params = params + updates
    expected = -(steps.mean(1) * np.geomspace(1e-3, 1, 512, dtype=np.float32)).sum(0)
    np.testing.assert_allclose(params.mean(0), expected, rtol=1e-3, atol=1e-5)
