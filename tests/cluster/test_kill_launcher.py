"""A launcher that does not end is killed with its processes; one that ends is left alone."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jdaso.cluster import kill_launcher

PROGRAM = Path(kill_launcher.__file__)
WATCH = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import kill_launcher as it; "
TIMEOUT = 20.0


@pytest.fixture
def launcher(tmp_path):
    """Starts nested shells with the names of MPICH's launchers, which run a script."""
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
        for pid in [*kill_launcher.descendants(job.pid), job.pid]:
            if kill_launcher.process_info(pid) is not None:
                os.kill(pid, 9)
        job.wait()
        job.stdout.close()


def test_launchers_are_found_among_all_ancestors(launcher):
    names = f"{WATCH} print(*(p.name for p in it.find_launchers()))"
    job = launcher(f'sh -c \'"{sys.executable}" -c "$1"; true\' - "{names}"; true')
    assert job.communicate(timeout=TIMEOUT)[0].split() == ["hydra_pmi_proxy", "mpiexec"]


def test_without_a_launcher_nothing_is_started():
    assert kill_launcher.find_launchers() == []


def test_launcher_that_waits_for_a_stopped_process_is_killed(launcher):
    stopped = "sleep 600 & kill -STOP $!; echo $!"
    job = launcher(f'{stopped}; "{sys.executable}" -c "{WATCH} it.start_watchdog()"; wait')
    pid = int(job.stdout.readline())
    assert job.wait(timeout=TIMEOUT) is not None
    assert kill_launcher.process_info(pid) is None


def test_open_mpis_launcher_that_stays_is_killed(tmp_path):
    prterun = tmp_path / "prterun"
    shutil.copy(shutil.which("bash"), prterun)
    script = f'"{sys.executable}" -c "{WATCH} it.start_watchdog()"; sleep 600; true'
    with subprocess.Popen([prterun, "-c", script]) as job:
        try:
            job.wait(timeout=TIMEOUT)  # or TimeoutExpired
        finally:
            job.kill()


def test_a_process_with_a_name_of_other_bytes_disturbs_nothing(tmp_path):
    program = os.fsencode(tmp_path) + b"/\xff\xfe) ("
    shutil.copy(shutil.which("sleep"), program)
    with subprocess.Popen([program, "60"]) as stranger:
        try:
            assert stranger.pid in kill_launcher.descendants(os.getpid())
        finally:
            stranger.kill()


def test_launcher_that_ends_is_left_alone(launcher):
    job = launcher(f'"{sys.executable}" -c "{WATCH} it.start_watchdog()"; exit 0')
    assert job.wait(timeout=TIMEOUT) == 0


def test_another_process_with_the_number_of_a_launcher_is_not_killed():
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        start = kill_launcher.process_info(bystander.pid).start
        began = time.monotonic()
        words = [str(bystander.pid), str(start + 1)]
        subprocess.run([sys.executable, PROGRAM, *words], check=True, timeout=TIMEOUT)
        assert time.monotonic() - began < TIMEOUT
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
