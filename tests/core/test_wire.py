"""Wire dtypes, and errors for unknown wires and options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdaso
from jdaso.core.wire import pack_sum, round_to, unpack_sum, wire_dtype
from jdaso.exchange.transport.collectives import widened

DTYPES = ("float64", "float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", [None, "float32", "bfloat16", "float16", "int8", "float4"])
def test_a_leaf_never_travels_in_a_wider_dtype_than_its_own(dtype, wire):
    travels = wire_dtype(jnp.dtype(dtype), wire)
    assert travels.itemsize <= jnp.dtype(dtype).itemsize
    assert wire is None or travels.itemsize <= max(wire_dtype(np.float64, wire).itemsize, 2)


NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz")


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", NARROW)
def test_round_to_has_the_bits_of_a_cast_also_where_the_numbers_are_widened_and_summed(dtype):
    dtype = jnp.dtype(dtype)
    every = np.arange(256**dtype.itemsize).astype(f"u{dtype.itemsize}").view(dtype)
    held = np.unique(every.astype(np.float32))
    held = held[np.isfinite(held)]
    largest, ends = held[-1], np.float32([0.0, -0.0, np.inf, -np.inf, np.nan])
    halfway = held[:-1] + (held[1:] - held[:-1]) / 2
    with np.errstate(over="ignore"):
        beyond = largest * np.float32([1 + 1e-5, 1.001, 1.01, 1.1, -1.1])
    near = [np.nextafter(halfway, np.float32(way)) for way in (np.inf, -np.inf)]
    any_bits = np.random.default_rng(0).integers(0, 2**32, 2**14, np.uint32).view(np.float32)
    x = np.concatenate([held, halfway, *near, beyond, ends, any_bits])
    subnormal = np.abs(x) < np.finfo(np.float32).tiny  # XLA has no subnormal float32
    x = np.where(subnormal, np.copysign(np.float32(0), x), x)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = x.astype(dtype)

    def summed(x):
        return round_to(x, dtype).astype(jnp.float32).sum(0)

    rounded = np.asarray(jax.jit(lambda x: round_to(x, dtype))(x))
    bits = [
        np.where(np.isnan(y.astype(np.float32)), 0, y.view(f"u{dtype.itemsize}"))
        for y in (rounded, expected)
    ]
    np.testing.assert_array_equal(*bits)
    wide = jax.jit(summed)(np.stack([x, np.zeros_like(x)]))
    np.testing.assert_array_equal(wide, expected.astype(np.float32))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_to_rounds_float64_as_xla_converts_it(dtype):
    x = np.random.default_rng(0).normal(size=100_000)
    with jax.enable_x64(True):
        wide = jax.jit(lambda x: round_to(x, dtype).astype(jnp.float64).sum(0))(
            np.stack([x, 0 * x])
        )
    expected = x.astype(np.float32).astype(jnp.dtype(dtype)).astype(np.float64)
    np.testing.assert_array_equal(wide, expected)
    np.testing.assert_array_equal(round_to(x, dtype).astype(np.float64), expected)


@pytest.mark.parametrize("dtype", NARROW[1:])
def test_a_sum_too_large_for_the_wire_survives_the_way_back(dtype):
    limits = jnp.finfo(dtype)
    total = np.array([3 * 0.9 * float(limits.max)], np.float32)
    back = unpack_sum(pack_sum(total, jnp.dtype(dtype), 3), 3)
    np.testing.assert_allclose(back, total, rtol=float(limits.eps))


@pytest.mark.parametrize("wire", [None, "int8", "float4"])
def test_leaves_of_eight_bits_are_averaged(wire):
    tx = jdaso.local_sgd(jdaso.axis_exchange("node", 4, wire=wire), period=1)
    params = jnp.array([[384.0], [256.0], [320.0], [320.0]]).astype(jnp.float8_e4m3fn)
    step = jax.vmap(lambda s, x: tx.update(jnp.zeros_like(x), s, x), axis_name="node")
    updates, state = step(jax.vmap(tx.init)(params), params)
    moved = params.astype(jnp.float32) + updates.astype(jnp.float32)
    assert moved.tolist() == [[320.0]] * 4
    assert state.left_out.tolist() == [0] * 4


@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "float8_e8m0fnu"])
def test_leaves_that_cannot_be_averaged_are_refused(dtype):
    tx = jdaso.dasgd(jdaso.axis_exchange("node", 4), 2, 1)
    with pytest.raises(ValueError, match=f"{dtype} cannot be averaged.*store it as float8_e5m2"):
        tx.init({"w": jnp.ones(2, dtype)})


def test_widening_bfloat16_by_shifting_bits_is_the_cast():
    every_pattern = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16)
    finite = every_pattern[np.isfinite(every_pattern.astype(np.float32))]
    np.testing.assert_array_equal(widened(finite), finite.astype(np.float32))


@pytest.mark.parametrize("wire", ["int4", "complex64", "no dtype", 3.5])
def test_an_unknown_wire_names_itself_and_the_choice(wire):
    with pytest.raises(ValueError, match=r"wire must be one of float64, float32, bfloat16"):
        jdaso.axis_exchange("node", 2, wire=wire)
    with pytest.raises(ValueError, match="blocking_wire must be one of"):
        jdaso.daso(jdaso.single_exchange(), 1, 0, blocking_wire=wire)


def test_complex_parameters_are_refused():
    tx = jdaso.daso(jdaso.single_exchange(), 1, 0)
    with pytest.raises(ValueError, match="complex parameters are not supported"):
        tx.init({"w": jnp.ones(2, jnp.complex64)})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunk_bytes": 8}, "chunk_bytes must be an integer >= 16"),
        ({"chunk_bytes": 1e6}, "chunk_bytes must be an integer >= 16"),
        ({"chunk_bytes": 2**31}, "chunk_bytes must be below"),
        ({"timeout": 0}, "timeout must be a finite number above 0"),
        ({"timeout": float("nan")}, "timeout must be a finite number above 0"),
        ({"wire": "int4"}, "wire must be one of"),
        ({"name": "a{}"}, "name must be a line of text without {} and %, got 'a{}'"),
        ({"same_bits": False, "wire": "int8"}, "same_bits=False.* and the wire int8 sends"),
        ({"same_bits": False, "wire": "float4"}, "same_bits=False.* and the wire float4 sends"),
    ],
)
def test_mpi_exchange_refuses_bad_options(option, message):
    with pytest.raises(ValueError, match=message):
        jdaso.mpi_exchange(jdaso.discover_topology(), **option)
