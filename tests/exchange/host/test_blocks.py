"""Compiled code sums blocks of int8 to the bits that NumPy computes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jdaso.core import int8
from jdaso.exchange.host import blocks, compiled

# Each byte is allowed in a message, except for exponents that no sender computes.
numbers = arrays(np.int8, st.tuples(st.integers(1, 4), st.integers(0, 3), st.just(64)))
exponents = st.integers(int8.MIN_EXPONENT, int8.MAX_EXPONENT)


def expected(terms):
    """Sums and packed sums by NumPy."""
    wide = int8.unpack(terms)
    sums = wide[0].copy()
    with np.errstate(over="ignore"):
        for term in wide[1:]:
            sums += term
    with np.errstate(over="ignore", invalid="ignore"):
        return sums, int8.pack(sums)


def computed(terms):
    sums = np.full((terms.shape[1], 64), np.nan, np.float32)
    packed = np.zeros((terms.shape[1], 65), np.uint8)
    blocks.sum_blocks(terms, sums, packed)
    return sums, packed


@pytest.fixture(params=["compiled", "numpy"])
def way(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(compiled, "load", lambda: "it was not built")
    elif isinstance(compiled.load(), str):
        pytest.skip("no compiled code")


@given(numbers, st.data())
def test_compiled_sums_have_the_bits_of_numpy(integers, data):
    members, rows, _ = integers.shape
    scales = data.draw(arrays(np.int8, (members, rows, 1), elements=exponents))
    terms = np.concatenate([scales, np.maximum(integers, -127)], axis=-1).view(np.uint8)
    for ours, theirs in zip(computed(terms), expected(terms), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


@pytest.mark.usefixtures("way")
def test_blocks_are_summed_and_decoded_with_and_without_a_library():
    terms = np.random.default_rng(0).normal(size=(3, 7, 64)).astype(np.float32)
    packed = int8.pack(terms)
    for ours, theirs in zip(computed(packed), expected(packed), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    decoded = np.empty((7, 64), np.float32)
    blocks.unpack_blocks(packed[1], decoded)
    np.testing.assert_array_equal(decoded, int8.unpack(packed[1]))
