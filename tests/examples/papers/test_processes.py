"""A program restarts itself as several processes once."""

import os
import sys

import processes
import pytest

from jdaso.cluster.launchers import LAUNCHERS


@pytest.fixture
def started(monkeypatch):
    """The commands that replaced this process."""
    for name in {name for launcher in LAUNCHERS for name in launcher.variables}:
        monkeypatch.delenv(name, raising=False)
    commands = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append((path, command)))
    monkeypatch.setattr(sys, "argv", ["train.py", "--sync", "passm"])
    return commands


def launcher(monkeypatch, found):
    monkeypatch.setattr(processes.shutil, "which", lambda name, path: found)


def test_mpiexec_starts_the_same_program(monkeypatch, started):
    launcher(monkeypatch, "/bin/mpiexec")
    processes.start(4)
    command = ["/bin/mpiexec", "-n", "4", sys.executable, "train.py", "--sync", "passm"]
    assert started == [("/bin/mpiexec", command)]


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda it: " ".join(it.variables))
def test_what_was_launched_starts_nothing(monkeypatch, started, launcher):
    for name in launcher.variables:
        monkeypatch.setenv(name, "4")
    processes.start(4)
    assert not started


def test_nothing_is_started_that_was_not_asked_for(started):
    processes.start(None)
    assert not started


def test_without_mpiexec_it_says_what_to_install(monkeypatch, started):
    launcher(monkeypatch, None)
    with pytest.raises(SystemExit, match="--processes 4 needs mpiexec: pip install mpich"):
        processes.start(4)
