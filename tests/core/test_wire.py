"""Wire dtypes, and errors for unknown wires and options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdaso
from jdaso.core.wire import pack_sum, unpack_sum, wire_dtype
from jdaso.exchange.transport.all_reduce import widened

DTYPES = ("float64", "float32", "bfloat16", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", [None, "float32", "bfloat16", "float16", "int8", "float4"])
def test_a_leaf_never_travels_in_a_wider_dtype_than_its_own(dtype, wire):
    travels = wire_dtype(jnp.dtype(dtype), wire)
    assert travels.itemsize <= jnp.dtype(dtype).itemsize
    assert wire is None or travels.itemsize <= max(wire_dtype(np.float64, wire).itemsize, 2)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"])
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
        jdaso.daso(jdaso.single_exchange(), jdaso.constant(1), blocking_wire=wire)


def test_complex_parameters_are_refused():
    tx = jdaso.daso(jdaso.single_exchange(), jdaso.constant(1))
    with pytest.raises(ValueError, match="complex parameters are not supported"):
        tx.init({"w": jnp.ones(2, jnp.complex64)})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"chunk_bytes": 8}, "chunk_bytes must be a whole number of at least 16"),
        ({"chunk_bytes": 1e6}, "chunk_bytes must be a whole number of at least 16"),
        ({"chunk_bytes": 2**31}, "chunk_bytes must be below"),
        ({"timeout": 0}, "timeout must be a finite number above 0"),
        ({"timeout": float("nan")}, "timeout must be a finite number above 0"),
        ({"wire": "int4"}, "wire must be one of"),
        ({"on_failure": "go on"}, "on_failure must be one of stop, shrink, got 'go on'"),
        ({"senders": "two"}, "senders must be one of one, all, got 'two'"),
        ({"same_bits": False, "wire": "int8"}, "same_bits=False.* and the wire int8 sends"),
        ({"same_bits": False, "wire": "float4"}, "same_bits=False.* and the wire float4 sends"),
    ],
)
def test_mpi_exchange_refuses_bad_options(option, message):
    with pytest.raises(ValueError, match=message):
        jdaso.mpi_exchange(jdaso.discover_topology(), **option)
