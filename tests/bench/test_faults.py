"""Some cells of the table of faults, as bench/faults.py measures them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import faults
from faulty_training import SAVE_EVERY

from jdaso.testing import Kind


def test_every_fault_is_measured():
    assert {case.kind for case in faults.CASES.values()} == {kind.name for kind in Kind}


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("FAIL_IN_FLIGHT", "DASO, cycling"),
        ("KILL_IN_CHECKPOINT", "DASO, cool-down"),
        ("WRONG_SHAPE", "EASGD"),
        ("NAN", "DaSGD"),
    ],
)
def test_outcome_is_the_promised_one(fault, phase):
    row = faults.measure(fault, phase)
    assert row.kept, row
    # When one is saved, the one before may just have been written.
    assert int(row.lost) <= 2 * SAVE_EVERY, row
