"""Compiled code sums rows of blocks to the bits that NumPy computes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jdaso.core.block_format import FORMATS, MIN_EXPONENT, format_of, pack, unpack
from jdaso.exchange.host import slots

# Each byte is allowed in a message, except for codes and exponents that no sender computes.
LEAST_CODE = {"int8": -127, "float4": -7}
MAX_EXPONENT = {"int8": 121, "float4": 124}  # with which all numbers are finite
shapes = st.tuples(st.integers(1, 4), st.integers(0, 3))


def expected(terms):
    """Sums and packed sums by NumPy."""
    wide = unpack(terms)
    sums = wide[0].copy()
    with np.errstate(over="ignore"):
        for term in wide[1:]:
            sums += term
    with np.errstate(over="ignore", invalid="ignore"):
        return sums, pack(sums, format_of(terms.dtype))


def computed(terms):
    sums = np.full((terms.shape[1], 64), np.nan, np.float32)
    packed = np.zeros(terms.shape[1:], terms.dtype)
    slots.sum_blocks(terms, sums, packed)
    return sums, packed


@pytest.mark.parametrize("name", FORMATS)
@given(shape=shapes, data=st.data())
def test_compiled_sums_have_the_bits_of_numpy(name, shape, data):
    rows, least = FORMATS[name], LEAST_CODE[name]
    exponents = st.integers(MIN_EXPONENT, MAX_EXPONENT[name])
    scales = data.draw(arrays(np.int8, (*shape, 1), elements=exponents))
    codes = data.draw(arrays(np.int8, (*shape, 64), elements=st.integers(least, -least)))
    if name == "float4":
        codes = (codes[..., :32] & 15) | (codes[..., 32:] << 4)
    terms = np.concatenate([scales, codes], axis=-1).view(rows.dtype)
    for ours, theirs in zip(computed(terms), expected(terms), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_summed_and_decoded(name):
    terms = np.random.default_rng(0).normal(size=(3, 7, 64)).astype(np.float32)
    packed = pack(terms, FORMATS[name])
    for ours, theirs in zip(computed(packed), expected(packed), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    decoded = np.empty((7, 64), np.float32)
    slots.unpack_blocks(packed[1], decoded)
    np.testing.assert_array_equal(decoded, unpack(packed[1]))


@pytest.mark.parametrize("name", FORMATS)
def test_every_byte_is_decoded_as_the_format_says(name):
    rows = FORMATS[name]
    size = rows.row_bytes - 1
    codes = np.arange(256, dtype=np.uint8).reshape(-1, size)
    packed = np.concatenate([np.ones((len(codes), 1), np.uint8), codes], axis=1).view(rows.dtype)
    decoded = np.empty((len(packed), 64), np.float32)
    slots.unpack_blocks(packed, decoded)
    np.testing.assert_array_equal(decoded, unpack(packed))
