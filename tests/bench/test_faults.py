"""Some rows of the table of bench/faults.py."""

import faults
import pytest
from faulty_training import SAVE_EVERY

from jdaso.faults import Kind


def test_every_fault_is_measured():
    assert {case.kind for case in faults.CASES.values()} == {kind.name for kind in Kind}


@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("FAIL_IN_FLIGHT", "DASO, cycling"),
        pytest.param("KILL_IN_CHECKPOINT", "DASO, cool-down", marks=pytest.mark.slow),
        pytest.param("WRONG_SHAPE", "EASGD", marks=pytest.mark.slow),
        pytest.param("NAN", "DaSGD", marks=pytest.mark.slow),
    ],
)
def test_outcome_is_the_promised_one(fault, phase):
    row = faults.measure(fault, phase)
    assert row.kept, row
    # While a checkpoint is saved, the previous one may be the last complete one.
    assert int(row.lost) <= 2 * SAVE_EVERY, row
