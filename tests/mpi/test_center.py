"""A center over MPI: results of the simulation, and workers that are late, stopped or dead."""

import pytest
from launch import Batch, mpiexec, passes

TOGETHER = Batch(
    3, {case: ("center.py", case) for case in ("resumed", "replay", "late", "refused")}
)


def test_one_worker_over_mpi_is_the_simulation_with_one():
    passes(mpiexec(1, "center.py", "alone"))


def test_a_worker_of_two_devices_is_the_simulation_of_one():
    passes(mpiexec(1, "center.py", "devices"))


def test_workers_go_on_from_a_center_that_was_saved():
    TOGETHER.passes("resumed")


def test_three_workers_are_a_replay_of_the_order_of_arrival_and_a_simulation_in_that_order():
    TOGETHER.passes("replay")


@pytest.mark.parametrize("case", ["late", "refused"])
def test_workers_come_late_and_are_refused_without_harm_to_others(case):
    TOGETHER.passes(case)


def test_a_worker_that_is_stopped_stops_nobody_and_goes_on():
    ended = mpiexec(3, "center.py", "stopped", timeout=120, forked=False)
    passes(ended)
    assert "has been silent for 2 s; the others continue" in ended.output
    assert "is back" in ended.output


def test_a_worker_that_is_killed_stops_nobody():
    ended = mpiexec(3, "center.py", "killed", timeout=120, survive=True)
    assert "rank 0 came to its end" in ended.output, ended.output
    assert "rank 1 came to its end" in ended.output, ended.output
    assert "has died; the others continue" in ended.output


def test_a_worker_that_is_killed_ends_the_job_if_an_exchange_needs_it():
    ended = mpiexec(3, "center.py", "killed_with_an_exchange", timeout=120, survive=True)
    assert ended.returncode != 0, ended.output
    for rank in (0, 1):
        assert f"rank {rank} came to its end" not in ended.output, ended.output
    said = [line for line in ended.output.splitlines() if "jdaso: ending all processes: " in line]
    assert len(said) == 2, ended.output
    assert all("processes: rank 2 (" in line and "has died" in line for line in said)


def test_a_worker_that_fails_stops_nobody():
    ended = mpiexec(3, "center.py", "failed", timeout=120, survive=True)
    assert ended.returncode != 0
    assert "ZeroDivisionError" in ended.output
    assert "failed; the others continue" in ended.output
    assert "rank 0 came to its end" in ended.output, ended.output
    assert "rank 1 came to its end" in ended.output, ended.output
