"""A process that dies is named by all others; one that is silent or slow is called what it is."""

import pytest
from launch import mpiexec, passes

import jdaso

PROCESSES = 3
ENDING = "jdaso: ending all processes: "


@pytest.mark.parametrize(
    ("case", "dead"),
    [
        ("killed", 0),
        ("killed", 2),
        ("killed beside its child", 2),
        ("killed before its exit", 0),
        ("killed while it waits at exit", 1),
        ("killed when all others have ended", 0),
        ("killed when all others have ended", 1),
    ],
)
def test_death_is_named_by_all_others_though_nobody_waits(case, dead):
    ended = mpiexec(PROCESSES, "death.py", case, dead, timeout=60, deaths_are_noticed=False)
    assert ended.returncode == jdaso.cluster.EXIT_NODE_LOST, ended.output
    said = [line for line in ended.output.splitlines() if ENDING in line]
    assert len(said) == PROCESSES - 1, ended.output
    assert all(f"{ENDING}rank {dead} (" in line and "has died" in line for line in said)


def test_death_that_the_launcher_notices_ends_all_as_well():
    ended = mpiexec(PROCESSES, "death.py", "killed", 1, timeout=60)
    assert ended.returncode != 0


def test_uncaught_exception_is_told_by_all():
    ended = mpiexec(PROCESSES, "death.py", "exception", timeout=60)
    assert ended.returncode == 1, ended.output
    said = [line for line in ended.output.splitlines() if ENDING in line]
    assert len(said) == PROCESSES, ended.output
    assert all("rank 1 (" in line for line in said)
    # Rank 1 has printed its traceback, and does not repeat the error.
    assert sum("ZeroDivisionError: what went wrong" in line for line in said) == PROCESSES - 1
    assert sum(line.endswith("failed: see the error above") for line in said) == 1


def test_stopped_process_is_called_silent_and_given_up():
    # jdaso kills a launcher that does not notice the abort. It finds it among its ancestors.
    ended = mpiexec(PROCESSES, "death.py", "stopped", timeout=60, forked=False)
    assert ended.returncode == jdaso.cluster.EXIT_NODE_LOST, ended.output
    assert "is late, for 3 s now: it waits for rank 1 (" in ended.output
    assert "silent: stopped, or its host or link is down" in ended.output
    assert "did not complete within 6 s: nothing came from rank 1 (" in ended.output
    assert "alive" not in ended.output


def test_slow_process_is_called_alive_and_waited_for():
    ended = mpiexec(PROCESSES, "death.py", "slow", timeout=60)
    passes(ended)
    assert "is late, for 6 s now: it waits for rank 1 (" in ended.output
    assert "alive: slower" in ended.output
    assert "silent" not in ended.output


def test_process_that_has_exited_is_neither_dead_nor_late():
    ended = mpiexec(PROCESSES, "death.py", "exited", timeout=60)
    assert ended.returncode == 1, ended.output
    said = [line for line in ended.output.splitlines() if "waiting for all other" in line]
    assert len(said) == 2, ended.output
    assert all(": rank 1 (" in line and ") (has exited); rank " in line for line in said)
    assert "died" not in ended.output
    assert "silent" not in ended.output


@pytest.mark.parametrize("case", ["ended", "exception in a child"])
def test_ordinary_ends_are_no_deaths(case):
    ended = mpiexec(PROCESSES, "death.py", case, timeout=60, deaths_are_noticed=False)
    passes(ended)
    assert ended.output.count("came to its end") == PROCESSES
    assert ENDING not in ended.output
