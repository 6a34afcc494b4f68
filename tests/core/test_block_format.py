"""The wires int8 and float4: how they round, and that error feedback keeps the rounding errors."""

import functools

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
from jdaso.core import block_format, engine, error_feedback, wire

NODES = 3
NODE_AXIS = jdaso.axis_exchange("node", NODES)
WIRES = ("int8", "float4")
INTEGERS = {
    "int8": np.arange(-127, 128),
    "float4": np.array([-12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12]),
}

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)  # including subnormals
of_one_size = st.floats(-1, 1, width=32)
numbers = st.one_of(
    arrays(np.float32, (2, 64), elements=finite),
    arrays(np.float32, (2, 64), elements=of_one_size),
    arrays(np.float32, (2, 64), elements=of_one_size).map(lambda x: x * np.float32(2.0**-99)),
    arrays(np.float32, (2, 64), elements=st.integers(-254, 254).map(lambda i: i / 2)),  # ties
)
jax_pack, jax_unpack = jax.jit(block_format.pack, static_argnums=1), jax.jit(block_format.unpack)


def steps(rows):
    """The scale of each block, float64[blocks, 1]."""
    return 2.0 ** rows.view(np.int8)[:, :1].astype(np.float64)


def nearest(x, integers):
    """The nearest integer of each number, float64. Of two, the one with an even index."""
    distances = np.abs(x[..., None] - integers)
    even = np.arange(len(integers)) - len(integers) // 2
    return integers[np.lexsort((even % 2 * np.ones_like(distances), distances))[..., 0]]


@pytest.mark.parametrize("name", WIRES)
@settings(max_examples=200, deadline=None)
@given(x=numbers)
def test_numbers_are_rounded_to_the_nearest_of_a_block(name, x):
    rows = block_format.pack(x, block_format.FORMATS[name])
    limit, smallest = INTEGERS[name][-1], block_format.MIN_EXPONENT
    highest = {"int8": 121, "float4": 124}[name]
    inside = np.clip(x.astype(np.float64), -limit * 2.0**highest, limit * 2.0**highest)
    expected = nearest(inside / steps(rows), INTEGERS[name]) * steps(rows)
    np.testing.assert_array_equal(block_format.unpack(rows), expected.astype(np.float32))
    # The step is the smallest power of two that reaches the largest number.
    largest = np.abs(inside).max(axis=1, keepdims=True)
    assert (largest <= limit * steps(rows)).all()
    finer = rows.view(np.int8)[:, :1] > smallest
    assert (largest[finer] > limit * steps(rows)[finer] / 2).all()


@pytest.mark.parametrize("name", WIRES)
@settings(max_examples=200, deadline=None)
@given(x=numbers)
def test_numpy_and_xla_get_the_same_bits_and_twice_rounded_is_once_rounded(name, x):
    rows = block_format.pack(x, block_format.FORMATS[name])
    np.testing.assert_array_equal(jax_pack(x, block_format.FORMATS[name]), rows)
    rounded = block_format.unpack(rows)
    assert np.isfinite(rounded).all()
    np.testing.assert_array_equal(np.asarray(jax_unpack(rows)).view("u4"), rounded.view("u4"))
    # If the largest number of float4 was rounded down, a smaller exponent has the same numbers.
    again = block_format.pack(rounded, block_format.FORMATS[name])
    np.testing.assert_array_equal(block_format.unpack(again).view("u4"), rounded.view("u4"))


@pytest.mark.parametrize("exponent", [block_format.MIN_EXPONENT, -30, 0, 121])
@pytest.mark.parametrize("name", WIRES)
def test_what_can_be_represented_is_not_rounded(name, exponent):
    whole = np.resize(INTEGERS[name], (4, 64)).astype(np.float32) * np.float32(2.0**exponent)
    rows = block_format.pack(whole, block_format.FORMATS[name])
    np.testing.assert_array_equal(block_format.unpack(rows), whole)


def test_float4_has_the_values_of_the_microscaling_formats():
    values = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float32)
    assert set(2 * values) == {float(k) for k in INTEGERS["float4"]}


@pytest.mark.parametrize("shape", [(), (0,), (1,), (64,), (5, 13), (3, 2, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", WIRES)
def test_a_leaf_of_any_shape_fills_whole_blocks(name, shape, dtype):
    leaf = np.random.default_rng(0).normal(size=shape).astype(jnp.dtype(dtype))
    travels = wire.wire_dtype(leaf.dtype, name)
    rows = wire.pack(leaf, travels)
    width = {"int8": 65, "float4": 33}[name]
    assert rows.shape == wire.wire_shape(shape, travels) == (-(-leaf.size // 64), width)
    back = wire.rounded(leaf, wire.block_bits(name))
    assert (back.shape, back.dtype) == (leaf.shape, leaf.dtype)
    error = np.abs(back.astype(np.float32) - leaf.astype(np.float32))
    # All are below 4. The step of int8 is then at most 1/16, the largest of float4 at most 2.
    # bfloat16 has as many bits as int8 and rounds no further.
    assert (error <= {"int8": 1 / 32, "float4": 1}[name]).all()


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
@pytest.mark.parametrize("name", WIRES)
def test_what_is_owed_and_what_has_been_agreed_on_are_what_all_nodes_have_done(name):
    """For Local SGD the sum telescopes: x + mean_i r_i = x(0) - sum over steps of mean_i lr g_i."""
    x, grads = scattered_run(0, 40, NODES)
    params, (residual, anchor) = simulate(
        jdaso.local_sgd(NODE_AXIS, period=4, wire=name), x, grads, look=feedback
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


@pytest.mark.parametrize("name", WIRES)
def test_the_mean_over_time_of_constant_gradients_is_exact(name):
    """This includes numbers a thousand times smaller than others of their block."""
    _, grads = scattered_run(1, 1, NODES)
    steps = 400
    averaging = jdaso.allreduce_gradients(NODE_AXIS, wire=name)
    start, grads = np.zeros(grads[0].shape), np.repeat(grads, steps, axis=0)
    tx = optax.chain(averaging, optax.sgd(1.0))
    params, (residual, _) = train(tx, start, grads, look=feedback)
    error = np.abs(-params[:, 0] / np.arange(1, steps + 1)[:, None] - grads[0].mean(axis=0))
    # The residual is at most half a step of the message and half a step of the sum. The largest
    # gradient is below 4 and a sum below 12. For int8 half a step is then 1/64 and 1/16. float4
    # rounds by at most a fifth of the largest number.
    assert np.abs(residual).max() <= {"int8": 1 / 64 + 1 / 16, "float4": (4 + 12) / 5}[name]
    bound = np.abs(residual).max(axis=(0, 1)) / np.arange(1, steps + 1)[:, None]
    # The parameters are a sum of 400 float32 numbers of either size.
    assert (error <= bound + steps * 2.0**-24 * np.abs(grads).max()).all()


@pytest.mark.parametrize(
    ("name", "small", "step"), [("int8", 1e-5, 1 / 64), ("float4", 1e-4, 1 / 8)]
)
def test_numbers_far_below_the_step_of_their_block_are_sent_in_the_end(name, small, step):
    """The residual sums up what is not sent, so it needs more bits than the wire."""
    averaging = jdaso.allreduce_gradients(jdaso.single_exchange(wire=name))
    grads, steps = jnp.array([1.0, small]), 4000

    def body(carry, _):
        state, sent = carry
        mean, state = averaging.update(grads, state, grads)
        return (state, sent + mean), None

    start = averaging.init(grads), jnp.zeros(2)
    (_, sent), _ = jax.jit(lambda x: jax.lax.scan(body, x, length=steps))(start)
    # The residual is at most half a step of the message and half a step of the sum.
    np.testing.assert_allclose(sent, steps * grads, rtol=0, atol=step)
    assert steps * small > step


def distance(one, other):
    """Distance of two runs at each step, relative to the path of the parameters."""
    path = np.linalg.norm(other - other[:1], axis=(1, 2)).max()
    return np.linalg.norm(one - other, axis=(1, 2)) / path


def forgetful(monkeypatch):
    """Disables error feedback, so that rounding errors are lost."""

    with_residual, with_rest = error_feedback.compress, error_feedback.decompress

    def compress(*args):
        message, residual = with_residual(*args)
        return message, [jnp.zeros_like(r) for r in residual]

    def decompress(*args):
        means, residual, anchor = with_rest(*args)
        return means, [jnp.zeros_like(r) for r in residual], anchor

    monkeypatch.setattr(engine, "compress", compress)
    monkeypatch.setattr(error_feedback, "decompress", decompress)


SCHEDULE = {"period": 4, "delay": 2, "warmup": 20, "cooldown": 20, "total": 200}
BUILD = {
    "local_sgd": lambda wire: jdaso.local_sgd(NODE_AXIS, 2, wire=wire),
    "dasgd": lambda wire: jdaso.dasgd(NODE_AXIS, 4, 3, wire=wire),
    "daso": lambda wire: jdaso.daso(
        NODE_AXIS, schedule=jdaso.cycling(**SCHEDULE), wire=wire, blocking_wire="float32"
    ),
    "easgd": lambda wire: jdaso.easgd(NODE_AXIS, 4, wire=wire),
    "diloco": lambda wire: jdaso.diloco(NODE_AXIS, 4, delay=2, mix=0.5, wire=wire),
}


@functools.cache
def common_direction():
    x, grads = scattered_run(2, 200, NODES)
    return x, grads + np.mean(grads, axis=0)


@functools.cache
def exact_run(name):
    return simulate(BUILD[name]("float32"), *common_direction())[0]


@pytest.mark.parametrize(("wire", "error"), [("int8", 1 / 256), ("float4", 1 / 16)])
@pytest.mark.parametrize("name", BUILD)
def test_a_run_stays_close_to_the_one_that_is_not_rounded(name, wire, error, monkeypatch):
    exact, run = exact_run(name), common_direction()
    quantized, _ = simulate(BUILD[name](wire), *run)
    forgetful(monkeypatch)
    lossy, _ = simulate(BUILD[name](wire), *run)
    # The residual is at most half a step. For int8 this is 1/256 of the change between two
    # exchanges, for float4 1/5 of it. The path is longer than this change.
    assert distance(quantized, exact).max() < error
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
    averaging = jdaso.daso(NODE_AXIS, 2, 1, wire="int8")
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


@pytest.mark.parametrize("name", WIRES)
def test_mpi4jax_has_no_such_wires(name):
    with pytest.raises(ValueError, match="has no wires int8 and float4: use mpi_exchange"):
        jdaso.exchange.mpi4jax_exchange(jdaso.discover_topology(), wire=name)


def test_a_node_can_send_int8_and_float4_in_turn():
    """Warm-up and cool-down have another number of bits, and the residual serves both."""
    x, grads = scattered_run(4, 200, NODES)
    exact, _ = simulate(BUILD["daso"]("float32"), x, grads)
    tx = jdaso.daso(
        NODE_AXIS, schedule=jdaso.cycling(**SCHEDULE), wire="float4", blocking_wire="int8"
    )
    params, bits = simulate(tx, x, grads, look=block_bits)
    assert set(bits[:20].flat) == {0, 8}  # the first mean is in float32
    assert set(bits[30:180].flat) == {4}
    assert set(bits[190:].flat) == {8}
    assert distance(params, exact).max() < 1 / 5


def block_bits(state, params):
    """The bits of a number in the last exchange."""
    del params
    return jdaso.core.averaging_state(state).fragments[0].feedback.block_bits


def test_an_exchange_may_force_it():
    averaging = jdaso.local_sgd(jdaso.single_exchange(wire="int8"), period=1)
    state = averaging.init({"w": jnp.ones(3)})
    assert state.fragments[0].feedback.residual[0].shape == (3,)
    with pytest.raises(ValueError, match="contradicts the exchange"):
        jdaso.local_sgd(jdaso.single_exchange(wire="int8"), period=1, wire="float32")


@pytest.mark.parametrize("name", ["easgd", "diloco"])
def test_the_center_of_the_algorithm_is_the_anchor(name):
    """What is sent is the difference to the center, so the first exchange is rounded as well."""
    x, grads = scattered_run(5, 8, NODES)
    averaging = BUILD[name]("float4")
    _, (residual, anchor) = simulate(averaging, x, grads, look=feedback)
    assert anchor.size == 0
    assert residual[-1].any()


def test_other_wires_remember_nothing():
    state = jdaso.local_sgd(jdaso.single_exchange(), period=1).init({"w": jnp.ones(3)})
    assert state.fragments[0].feedback == ()


@pytest.mark.parametrize("exponent", [-90, -1, 0, 100])
@pytest.mark.parametrize("name", WIRES)
def test_the_exponent_is_the_smallest_with_which_the_largest_number_fits(name, exponent):
    fits = np.float32(INTEGERS[name][-1] * 2.0**exponent)
    exceeds = np.nextafter(fits, np.float32(np.inf))
    for largest, expected in ((fits, exponent), (exceeds, exponent + 1)):
        block = np.zeros((1, block_format.BLOCK_SIZE), np.float32)
        block[0, 5] = -largest
        assert block_format.pack(block, block_format.FORMATS[name]).view(np.int8)[0, 0] == expected
