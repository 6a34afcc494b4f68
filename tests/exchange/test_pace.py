"""From when on an operation is late, against the median and the median deviation by NumPy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jdaso.exchange._pace import Pace


def test_without_a_history_the_floors_hold():
    assert (Pace(600.0).warning(), Pace(600.0).deadline()) == (30.0, 600.0)
    assert (Pace(8.0).warning(), Pace(8.0).deadline()) == (4.0, 8.0)


@given(
    st.floats(0.1, 1e3),
    st.lists(st.floats(0.0, 1e4), min_size=5, max_size=120),
)
def test_late_is_what_is_far_from_the_median_of_the_last_hundred(timeout, seconds):
    pace = Pace(timeout)
    for each in seconds:
        pace.note(each)
    middle = np.median(seconds[-100:])
    deviation = np.median(np.abs(np.array(seconds[-100:]) - middle))
    np.testing.assert_allclose(pace.deadline(), max(timeout, middle + 200 * deviation))
    least = min(30.0, timeout / 2)
    np.testing.assert_allclose(pace.warning(), max(least, middle + 20 * deviation))
    assert pace.warning() <= pace.deadline() or pace.warning() <= middle + 200 * deviation


def test_few_operations_say_nothing():
    pace = Pace(10.0)
    for _ in range(4):
        pace.note(1000.0)
    assert pace.deadline() == 10.0
