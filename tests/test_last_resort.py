"""A launcher that does not end is ended, with all it has started; one that does is left alone."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jdaso import _last_resort

PROGRAM = Path(_last_resort.__file__)
WATCH = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import _last_resort as it; "
NEVER_KILLED = 20.0


@pytest.fixture
def launcher(tmp_path):
    """Shells by the names of MPICH's launchers, one below the other, that run a script."""
    for name in ("mpiexec", "hydra_pmi_proxy"):
        shutil.copy(shutil.which("bash"), tmp_path / name)
    started = []

    def start(script):
        inner = f"'{tmp_path}/hydra_pmi_proxy' -c \"$0\"; true"
        command = [tmp_path / "mpiexec", "-c", inner, script]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for job in started:
        for pid in [*_last_resort.descendants(job.pid), job.pid]:
            if _last_resort.running(pid) is not None:
                os.kill(pid, 9)
        job.wait()
        job.stdout.close()


def test_launchers_are_found_whatever_lies_between(launcher):
    names = f"{WATCH} print(*(p.name for p in it.launchers()))"
    job = launcher(f'sh -c \'"{sys.executable}" -c "$1"; true\' - "{names}"; true')
    assert job.communicate(timeout=NEVER_KILLED)[0].split() == ["hydra_pmi_proxy", "mpiexec"]


def test_without_a_launcher_nothing_is_started():
    assert _last_resort.launchers() == []


def test_launcher_that_waits_for_a_stopped_process_is_ended(launcher):
    stopped = "sleep 600 & kill -STOP $!; echo $!"
    job = launcher(f'{stopped}; "{sys.executable}" -c "{WATCH} it.watch()"; wait')
    pid = int(job.stdout.readline())
    assert job.wait(timeout=NEVER_KILLED) is not None
    assert _last_resort.running(pid) is None


def test_launcher_that_ends_is_left_alone(launcher):
    job = launcher(f'"{sys.executable}" -c "{WATCH} it.watch()"; exit 0')
    assert job.wait(timeout=NEVER_KILLED) == 0


def test_another_process_with_the_number_of_a_launcher_is_not_killed():
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        start = _last_resort.running(bystander.pid).start
        began = time.monotonic()
        words = [str(bystander.pid), str(start + 1)]
        subprocess.run([sys.executable, PROGRAM, *words], check=True, timeout=NEVER_KILLED)
        assert time.monotonic() - began < NEVER_KILLED
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
