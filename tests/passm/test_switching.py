"""The phases of PASSM+, and its heuristic for the switches."""

import golden_passm
import numpy as np
import pytest

from jdaso.passm import phases, switches_around


@pytest.mark.parametrize("switches", [[], [3], [3, 5], [1, 2, 3, 4], [75, 135, 165, 210, 225]])
@pytest.mark.parametrize("processes", [2, 4])
def test_phases_are_those_of_the_paper(switches, processes):
    phase = phases(switches, processes)
    whole, factor = golden_passm.plus(switches, processes)
    for step in range(300):
        assert phase(step).whole == whole(step)
        assert phase(step).factor == pytest.approx(factor(step), rel=1e-12)


@pytest.mark.parametrize(
    ("drops", "total", "first", "table"),
    [
        # The table ends the last window at the drop, 225. 10 % of 300 are 30 steps.
        ([150, 225], 300, 0.25, [75, 135, 165, 210, 240]),
        ([60, 120, 160], 200, 0.15, [30, 50, 70, 110, 130, 150, 170]),
    ],
)
def test_the_heuristic_gives_the_papers_switches(drops, total, first, table):
    assert switches_around(drops, total, first) == table


def test_adjacent_windows_are_merged_and_the_end_is_no_switch():
    assert switches_around([28, 35, 98], 100) == [40, 93]
    assert switches_around([], 100, first=1.0) == []
    assert switches_around([10], 100) == [25]  # the window is inside the first quarter
    assert switches_around([50, 75], 100, window=0) == [25]
    share = np.mean([phases(switches_around([50, 75], 100), 4)(step).whole for step in range(100)])
    assert share == pytest.approx(0.25 + 0.1 + 0.1)


@pytest.mark.parametrize("switches", [[0], [-1], [3, 3], [5, 2], [1.5]])
def test_switches_are_increasing(switches):
    with pytest.raises(ValueError, match="switches must"):
        phases(switches, 4)


def test_one_process_is_refused():
    with pytest.raises(ValueError, match="at least 2 processes, got 1"):
        phases([3], 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"drops": [100]}, "drops must be below total, 100, got 100"),
        ({"drops": [-1]}, "drops must be an integer"),
        ({"drops": [], "first": 1.5}, r"first must be a share in \[0, 1\], got 1.5"),
        ({"drops": [], "window": -1}, "window must be a finite number"),
        ({"drops": [], "total": 0}, "total must be an integer"),
    ],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        switches_around(**{"total": 100} | arguments)
