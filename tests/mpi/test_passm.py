"""Shared memory between MPI processes: what was simulated, and what goes wrong between them."""

import pytest
from launch import Batch, mpiexec, passes, refuses


def test_three_processes_share_one_model():
    """Numbers are whole, steps in turn are those of the simulation, and out of turn they learn."""
    passes(mpiexec(3, "passm.py", "works", timeout=180))


def test_four_processes_lose_no_update_and_servers_average_over_their_slaves():
    passes(mpiexec(4, "passm.py", "servers", timeout=180))


def test_a_group_of_a_server_that_waits_is_told_who_of_it_is_missing():
    ended = mpiexec(4, "passm.py", "a group waits", timeout=120)
    said = "".join(x for x in ended.output.splitlines() if x.startswith("rank 1: "))
    assert "cannot complete: rank 3 (" in said, ended.output
    assert "closed this exchange, or exited" in said, ended.output
    assert "has ended by" not in ended.output, ended.output
    assert "rank 0" not in said, ended.output
    assert "rank 2" not in said, ended.output


# case -> what the error must say
ERRORS = {
    "ends early": ["rank 0", "waits at a barrier for rank 1", "which ended without it"],
    "late": ["rank 0", "waited 1 s at a barrier for rank 1"],
}
ERRORS_OF_ALL = {
    "other parameters": ["parameters differ", "rank 1", "float32(4,)"],
    "no space": ["rank 0", "shares parameters of 1099511.6 MB", "/dev/shm has only", "--shm-size"],
    "other blocks": ["differ", "block 0", "rank 1"],
}
ALL = Batch(2, {case: ("passm.py", case) for case in ERRORS_OF_ALL}, raises=True)


@pytest.mark.parametrize("case", ERRORS_OF_ALL)
def test_error_of_all_names_who_and_what(case):
    errors = ALL.raised(case)
    for text in ERRORS_OF_ALL[case]:
        assert text in errors


@pytest.mark.parametrize("case", ERRORS)
def test_error_names_who_and_what(case):
    refuses(mpiexec(2, "passm.py", case, timeout=120), ERRORS[case])
