"""Processes take disjoint parts of one permutation of the samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso.passm import minibatches


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 60), st.integers(0, 3))
def test_an_epoch_takes_every_sample_once_at_most(batch_sizes, more, epoch):
    num_samples = sum(batch_sizes) + more
    parts = minibatches(num_samples, batch_sizes, epoch)
    steps = num_samples // sum(batch_sizes)
    assert [part.shape for part in parts] == [(steps, size) for size in batch_sizes]
    taken = np.concatenate([part.ravel() for part in parts])
    assert len(set(taken)) == len(taken) == steps * sum(batch_sizes)
    assert set(taken) <= set(range(num_samples))


def test_epochs_and_seeds_differ_and_repeat():
    first = minibatches(100, [50], 0)[0]
    np.testing.assert_array_equal(first, minibatches(100, [50], 0)[0])
    assert not np.array_equal(first, minibatches(100, [50], 1)[0])
    assert not np.array_equal(first, minibatches(100, [50], 0, seed=1)[0])


@pytest.mark.parametrize("batch_sizes", [[], [0], [3, -1], [11], [6, 5]])
def test_batch_sizes_that_do_not_fit_are_named(batch_sizes):
    with pytest.raises(ValueError, match="batch_sizes"):
        minibatches(10, batch_sizes, 0)
