"""Deadlines against the median and the median deviation by NumPy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jdaso.exchange.transport.progress import Deadlines


def test_without_durations_the_least_limits_hold():
    assert (Deadlines(600.0).warning(), Deadlines(600.0).deadline()) == (30.0, 600.0)
    assert (Deadlines(8.0).warning(), Deadlines(8.0).deadline()) == (4.0, 8.0)


@given(
    st.floats(0.1, 1e3),
    st.lists(st.floats(0.0, 1e4), min_size=5, max_size=120),
)
def test_limits_follow_the_median_of_the_last_hundred(timeout, seconds):
    deadlines = Deadlines(timeout)
    for each in seconds:
        deadlines.note(each)
    median = np.median(seconds[-100:])
    deviation = np.median(np.abs(np.array(seconds[-100:]) - median))
    np.testing.assert_allclose(deadlines.deadline(), max(timeout, median + 200 * deviation))
    least = min(30.0, timeout / 2)
    np.testing.assert_allclose(deadlines.warning(), max(least, median + 20 * deviation))
    assert (
        deadlines.warning() <= deadlines.deadline()
        or deadlines.warning() <= median + 200 * deviation
    )


def test_few_durations_change_nothing():
    deadlines = Deadlines(10.0)
    for _ in range(4):
        deadlines.note(1000.0)
    assert deadlines.deadline() == 10.0
