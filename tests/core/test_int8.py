"""The wire int8: how it rounds numbers, and that error feedback keeps the rounding errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from virtual_nodes import LR, random_run, simulate, train

import jdaso
from jdaso.core import error_feedback, fragment_merge, fragment_post, int8, wire

NODES = 3
NODE_AXIS = jdaso.axis_exchange("node", NODES)
LARGEST = np.float32(127 * 2.0**int8.MAX_EXPONENT)

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)  # including subnormals
of_one_size = st.floats(-1, 1, width=32)
blocks = st.one_of(
    arrays(np.float32, (2, 64), elements=finite),
    arrays(np.float32, (2, 64), elements=of_one_size),
    arrays(np.float32, (2, 64), elements=of_one_size).map(lambda x: x * np.float32(2.0**-99)),
)
jax_pack, jax_unpack = jax.jit(int8.pack), jax.jit(int8.unpack)


def steps(rows):
    """The scale of each block, float64[blocks, 1]."""
    return 2.0 ** rows.view(np.int8)[:, :1].astype(np.float64)


@settings(max_examples=200, deadline=None)
@given(blocks)
def test_numbers_are_rounded_to_the_nearest_of_a_block(x):
    rows = int8.pack(x)
    inside = np.clip(x, -LARGEST, LARGEST)
    error = np.abs(int8.unpack(rows).astype(np.float64) - inside)
    assert (error <= steps(rows) / 2).all()
    # The step is the smallest power of two that reaches the largest number.
    largest = np.abs(inside).max(axis=1, keepdims=True).astype(np.float64)
    assert (largest <= 127 * steps(rows)).all()
    finer = rows.view(np.int8)[:, :1] > int8.MIN_EXPONENT
    assert (largest[finer] > 127 * steps(rows)[finer] / 2).all()


@settings(max_examples=200, deadline=None)
@given(blocks)
def test_numpy_and_xla_get_the_same_bits_and_twice_rounded_is_once_rounded(x):
    rows = int8.pack(x)
    np.testing.assert_array_equal(jax_pack(x), rows)
    numbers = int8.unpack(rows)
    assert np.isfinite(numbers).all()
    np.testing.assert_array_equal(np.asarray(jax_unpack(rows)).view("u4"), numbers.view("u4"))
    np.testing.assert_array_equal(int8.pack(numbers), rows)


@pytest.mark.parametrize("exponent", [int8.MIN_EXPONENT, -30, 0, int8.MAX_EXPONENT])
def test_what_can_be_represented_is_not_rounded(exponent):
    whole = np.arange(-127, 127, dtype=np.float32)[:128].reshape(2, 64) * np.float32(2.0**exponent)
    np.testing.assert_array_equal(int8.unpack(int8.pack(whole)), whole)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (64,), (5, 13), (3, 2, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_leaf_of_any_shape_fills_whole_blocks(shape, dtype):
    leaf = np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype))
    travels = wire.wire_dtype(leaf.dtype, "int8")
    rows = wire.pack(leaf, travels)
    assert rows.shape == wire.wire_shape(shape, travels) == (-(-leaf.size // 64), 65)
    back = wire.rounded(leaf)
    assert (back.shape, back.dtype) == (leaf.shape, leaf.dtype)
    error = np.abs(back.astype(np.float32) - leaf.astype(np.float32))
    # For numbers below 4 the step is at most 1/16. bfloat16 has as many bits and rounds no further.
    assert (error <= 1 / 32).all()


def feedback(state, params):
    """Residual and anchor of the first fragment, each as one vector."""
    del params
    seen = jdaso.core.averaging_state(state).fragments[0].feedback
    return [jnp.concatenate([jnp.zeros(0), *leaves]) for leaves in (seen.residual, seen.anchor)]


def scattered_run(seed, steps, nodes, size=130):
    """Gradients whose sizes within a block differ by a factor of up to 1000."""
    x, grads = random_run(seed, steps, nodes, size, alike=True)
    return x, grads * 10.0 ** np.linspace(-3, 0, size)


def close(actual, expected, roundings):
    """Equal up to a number of roundings to float32 of the largest number."""
    atol = roundings * 2.0**-24 * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


@pytest.mark.usefixtures("optimized")
def test_what_is_owed_and_what_has_been_agreed_on_are_what_all_nodes_have_done():
    """For Local SGD the sum telescopes: x + mean_i r_i = x(0) - sum over steps of mean_i lr g_i."""
    x, grads = scattered_run(0, 40, NODES)
    params, (residual, anchor) = simulate(
        jdaso.local_sgd(NODE_AXIS, period=4, wire="int8"), x, grads, look=feedback
    )
    exact = x[0] - LR * grads.mean(axis=1).cumsum(axis=0)
    merged = slice(3, None, 4)  # after these steps all nodes hold the mean
    np.testing.assert_array_equal(params[merged], anchor[merged])
    np.testing.assert_array_equal(
        params[merged], np.broadcast_to(params[merged, :1], params[merged].shape)
    )
    # Each of 40 steps rounds x once, each of 10 exchanges x - a, v, P a, its sum with s, the mean.
    close(params[merged, 0] + residual[merged].mean(axis=1), exact[merged], roundings=40 + 5 * 10)
    assert np.abs(params[merged, 0] - exact[merged]).max() > 1e-5  # something was rounded


def test_the_mean_over_time_of_constant_gradients_is_exact():
    """This includes numbers a thousand times smaller than others of their block."""
    _, grads = scattered_run(1, 1, NODES)
    steps = 400
    averaging = jdaso.allreduce_gradients(NODE_AXIS, wire="int8")
    start, grads = np.zeros(grads[0].shape), np.repeat(grads, steps, axis=0)
    tx = optax.chain(averaging, optax.sgd(1.0))
    params, (residual, _) = train(tx, start, grads, look=feedback)
    error = np.abs(-params[:, 0] / np.arange(1, steps + 1)[:, None] - grads[0].mean(axis=0))
    # The residual is at most half a step of the message and half a step of the sum. The largest
    # gradient is below 4 and a sum below 12, so that half a step is 1/64 and 1/16.
    assert np.abs(residual).max() <= 1 / 64 + 1 / 16
    bound = np.abs(residual).max(axis=(0, 1)) / np.arange(1, steps + 1)[:, None]
    # The parameters are a sum of 400 float32 numbers of either size.
    assert (error <= bound + steps * 2.0**-24 * np.abs(grads).max()).all()


def distance(one, other):
    """Distance of two runs at each step, relative to the path of the parameters."""
    path = np.linalg.norm(other - other[:1], axis=(1, 2)).max()
    return np.linalg.norm(one - other, axis=(1, 2)) / path


def forgetful(monkeypatch):
    """Disables error feedback, so that rounding errors are lost."""

    def compress(*args):
        message, residual = error_feedback.compress(*args)
        return message, [jnp.zeros_like(r) for r in residual]

    def decompress(*args):
        means, residual, anchor = error_feedback.decompress(*args)
        return means, [jnp.zeros_like(r) for r in residual], anchor

    monkeypatch.setattr(fragment_post, "compress", compress)
    monkeypatch.setattr(fragment_merge, "decompress", decompress)


SCHEDULE = {"period": 4, "delay": 2, "warmup": 20, "cooldown": 20, "total": 200}
BUILD = {
    "local_sgd": lambda wire: jdaso.local_sgd(NODE_AXIS, 2, wire=wire),
    "dasgd": lambda wire: jdaso.dasgd(NODE_AXIS, 4, 3, wire=wire),
    "daso": lambda wire: jdaso.daso(
        NODE_AXIS, jdaso.cycling(**SCHEDULE), wire=wire, blocking_wire="float32"
    ),
}


@pytest.mark.parametrize("name", BUILD)
def test_a_run_stays_close_to_the_one_that_is_not_rounded(name, monkeypatch):
    x, grads = scattered_run(2, 200, NODES)
    grads += np.mean(grads, axis=0)  # a common direction
    exact, _ = simulate(BUILD[name]("float32"), x, grads)
    quantized, _ = simulate(BUILD[name]("int8"), x, grads)
    forgetful(monkeypatch)
    lossy, _ = simulate(BUILD[name]("int8"), x, grads)
    # The residual is at most half a step, about 1/256 of the change between two exchanges. The path
    # is longer than this change.
    assert distance(quantized, exact).max() < 1 / 256
    assert 4 * distance(quantized, exact)[-1] < distance(lossy, exact)[-1]


def test_a_node_that_is_left_out_owes_as_much_as_before():
    x, grads = scattered_run(3, 40, NODES)
    grads[13, 1, 5] = np.nan  # the exchange after step 15 lacks node 1
    grads[21, :, 5] = np.nan  # no node contributes to the one after step 23
    averaging = jdaso.local_sgd(NODE_AXIS, period=4, wire="int8")
    params, (residual, anchor) = simulate(averaging, x, grads, look=feedback)
    assert np.isfinite(residual).all()
    assert np.isfinite(params[15:20]).all()
    np.testing.assert_array_equal(anchor, np.broadcast_to(anchor[:, :1], anchor.shape))
    # Node 1 always sums the second of three blocks, and its residual holds that rounding error.
    own = np.delete(residual, slice(64, 128), axis=2)
    np.testing.assert_array_equal(own[15, 1], own[14, 1])
    assert (own[15, 0] != own[14, 0]).any()
    assert (own[19, 1] != own[15, 1]).any()
    for kept in (residual, anchor):
        np.testing.assert_array_equal(kept[23], kept[22])


def test_parameters_of_all_dtypes_and_shapes_are_exchanged():
    averaging = jdaso.daso(NODE_AXIS, jdaso.constant(2, 1), wire="int8")
    dtypes = ("float32", "bfloat16", "float16")

    def node(seed):
        line = jnp.linspace(-1, 1, 70).reshape(7, 10) * (1 + seed)
        params = {dtype: line.astype(dtype) for dtype in dtypes}
        params |= {"count": jnp.arange(3), "scale": seed, "none": jnp.zeros((0, 3))}
        state = averaging.init(params)
        for _ in range(5):
            updates = jax.tree.map(jnp.zeros_like, params)
            updates, state = averaging.update(updates, state, params)
            params = optax.apply_updates(params, updates)
        return params

    params = jax.jit(jax.vmap(node, axis_name="node"))(jnp.arange(3.0))
    mean = np.linspace(-1, 1, 70).reshape(7, 10) * 2
    for dtype in dtypes:
        # Merged twice, each time with weight 2/5 of a node's own. The middle node is at the mean.
        # The second time, differences of 0.4 are rounded to 1/256, and a bfloat16 of 2 to 1/64.
        far = params[dtype].astype(np.float32) - mean
        assert params[dtype].dtype == dtype
        np.testing.assert_allclose(np.abs(far).max(axis=(1, 2)), [0.16, 0, 0.16], atol=1 / 64)
    np.testing.assert_allclose(params["scale"], [0.84, 1, 1.16], atol=1 / 256)
    assert params["count"].tolist() == [[0, 1, 2]] * 3


def test_mpi4jax_has_no_such_wire():
    with pytest.raises(ValueError, match="has no wire 'int8': use mpi_exchange"):
        jdaso.exchange.mpi4jax_exchange(jdaso.discover_topology(), wire="int8")


def test_an_exchange_may_force_it():
    averaging = jdaso.local_sgd(jdaso.single_exchange(wire="int8"), period=1)
    state = averaging.init({"w": jnp.ones(3)})
    assert state.fragments[0].feedback.residual[0].shape == (3,)
    with pytest.raises(ValueError, match="contradicts the exchange"):
        jdaso.local_sgd(jdaso.single_exchange(wire="int8"), period=1, wire="float32")


def test_other_wires_remember_nothing():
    state = jdaso.local_sgd(jdaso.single_exchange(), period=1).init({"w": jnp.ones(3)})
    assert state.fragments[0].feedback == ()


@pytest.mark.parametrize("exponent", [-90, -1, 0, 100])
def test_the_exponent_is_the_smallest_with_which_the_largest_number_fits(exponent):
    fits = np.float32(127 * 2.0**exponent)
    exceeds = np.nextafter(fits, np.float32(np.inf))
    for largest, expected in ((fits, exponent), (exceeds, exponent + 1)):
        block = np.zeros((1, int8.BLOCK_SIZE), np.float32)
        block[0, 5] = -largest
        assert int8.pack(block).view(np.int8)[0, 0] == expected
