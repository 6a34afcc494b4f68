"""One job at a time writes to a folder, and a job that is dead keeps no other one out."""

import functools
import json
import os
import re
import subprocess
import sys
import time
import types

import pytest

import jdaso
from jdaso import JdasoError
from jdaso.checkpoint import Checkpoints, folder
from jdaso.checkpoint.folder import FolderLock, Holder

TOPOLOGY = jdaso.discover_topology()
STATE = {"x": 1.0}
# A process that locks a folder, and ends when its input does.
CHILD = """
import sys, pathlib
from jdaso.checkpoint import folder
folder.RENEW_SECONDS = 0.1
try:
    folder.FolderLock(pathlib.Path(sys.argv[1]), int(sys.argv[2])).acquire()
    print("holds it", flush=True)
except RuntimeError as error:
    print(error, flush=True)
sys.stdin.read()
"""


def opened(folder):
    return Checkpoints(folder, TOPOLOGY, jdaso.single_exchange())


def start(folder, run):
    command = [sys.executable, "-c", CHILD, str(folder), str(run)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes)


def clock(monkeypatch, sleep):
    """The clock of the lock, which only ``sleep(clock, seconds)`` moves."""
    fake = types.SimpleNamespace(now=1000.0, monotonic=lambda: fake.now)
    fake.sleep = functools.partial(sleep, fake)
    monkeypatch.setattr(folder, "time", fake)
    return fake


def pass_quickly(fake, seconds):
    fake.now += 20 * seconds


@pytest.fixture
def at_once(monkeypatch):
    """Waiting for a lock is an error."""

    def sleep(_, seconds):
        raise AssertionError(f"it waits for {seconds} s")

    clock(monkeypatch, sleep)


def test_of_jobs_that_start_together_one_gets_in_until_it_ends_and_the_others_are_told_its_name(
    tmp_path,
):
    jobs = [start(tmp_path, run) for run in (1, 2)]
    try:
        said = [job.stdout.readline() for job in jobs]
        first = jobs[said.index("holds it\n")]
        refused = rf"another job writes to .* process {first.pid} on "
        assert re.search(refused, said[1 - jobs.index(first)])
        third = opened(tmp_path)
        with pytest.raises(JdasoError, match=refused):
            third.save(1, STATE)
        third.close()
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]
        first.communicate(timeout=60)  # closes its input
        assert first.returncode == 0  # the thread ends with its process
        assert not (tmp_path / "lock").exists()
    finally:
        for job in jobs:
            job.kill()
            job.wait(timeout=60)


def test_a_job_that_was_killed_on_this_host_starts_again_at_once(tmp_path, at_once):
    ended = subprocess.Popen(["true"])
    ended.wait(timeout=60)
    locked_by(tmp_path, **folder.this_process(3)._replace(pid=ended.pid)._asdict())
    claimed(tmp_path)


def test_a_later_process_with_the_number_of_the_dead_one_is_not_taken_for_it(tmp_path, at_once):
    locked_by(tmp_path, **folder.this_process(3)._replace(pid=os.getppid(), start=1)._asdict())
    claimed(tmp_path)


def locked_by(folder, seconds_ago=0, **fields):
    """Writes the lock of a job on another host."""
    there = Holder(3, "elsewhere", "another kernel", 1, 1)._replace(**fields)
    (folder / "lock").write_text(json.dumps(there._asdict()))
    then = time.time() - seconds_ago
    os.utime(folder / "lock", (then, then))


def claimed(folder):
    """Locks a folder and releases it."""
    checkpoints = opened(folder)
    checkpoints.claim()
    assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()
    checkpoints.close()
    assert not (folder / "lock").exists()


SLURM = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "a"}


def test_a_job_that_slurm_requeued_gets_in_at_once(tmp_path, at_once, monkeypatch):
    for name, value in {**SLURM, "SLURM_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    locked_by(tmp_path, job="7@a")
    claimed(tmp_path)


@pytest.mark.parametrize(
    "environment",
    [
        SLURM,  # another step of the same allocation
        {**SLURM, "SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"},
        {**SLURM, "SLURM_CLUSTER_NAME": "b", "SLURM_RESTART_COUNT": "1"},
    ],
)
def test_another_job_of_slurm_is_refused(tmp_path, environment, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    locked_by(tmp_path, job="7@a", seconds_ago=5)
    clock(monkeypatch, lambda *_: locked_by(tmp_path, job="7@a"))  # renews it
    with pytest.raises(JdasoError, match=r"process 1 of Slurm job 7@a on elsewhere, which renewed"):
        opened(tmp_path).claim()


def test_a_lock_older_than_three_minutes_is_dead(tmp_path, at_once):
    locked_by(tmp_path, 181)
    claimed(tmp_path)


@pytest.mark.parametrize("seconds_ago", [0, -10_000])  # the other clock may be ahead
def test_a_younger_one_is_watched_until_it_is_three_minutes_old(
    tmp_path, monkeypatch, caplog, seconds_ago
):
    fake = clock(monkeypatch, pass_quickly)
    locked_by(tmp_path, seconds_ago)
    claimed(tmp_path)
    assert 180 <= fake.now - 1000 <= 191
    assert caplog.text.count("is locked by process 1 on elsewhere. This job waits") == 1


@pytest.mark.parametrize("text", ["", "[]", "{", '{"run": 1}', '{"restarts": "x"}', "9" * 9000])
def test_a_damaged_lock_keeps_nobody_out_for_longer(tmp_path, text, monkeypatch):
    fake = clock(monkeypatch, pass_quickly)
    (tmp_path / "lock").write_text(text)
    claimed(tmp_path)
    assert fake.now - 1000 <= 191


def test_a_job_whose_folder_was_taken_over_is_refused_at_its_next_save(tmp_path, monkeypatch):
    """It was stopped for so long that another job took it for dead."""
    checkpoints = opened(tmp_path)
    checkpoints.save(1, STATE)
    checkpoints.wait()
    locked_by(tmp_path)
    clock(monkeypatch, lambda *_: locked_by(tmp_path, seconds_ago=-1))  # the other renews it
    with pytest.raises(JdasoError, match="process 1 on elsewhere, which renewed the lock 0 s ago"):
        checkpoints.save(2, STATE)
    checkpoints.close()
    assert (tmp_path / "lock").exists()  # that of the other
    assert checkpoints.steps() == [1]


def test_a_lock_that_somebody_deleted_is_made_again(tmp_path):
    checkpoints = opened(tmp_path)
    checkpoints.save(1, STATE)
    (tmp_path / "lock").unlink()
    checkpoints.save(2, STATE)
    assert (tmp_path / "lock").exists()
    checkpoints.close()
    assert not (tmp_path / "lock").exists()


def test_a_process_may_open_a_folder_again(tmp_path, at_once):
    """As the cell of a notebook does that is run twice."""
    first = opened(tmp_path)
    first.save(1, STATE)
    first.wait()  # until it is written, so that the second one finds it
    second = opened(tmp_path)
    second.restore(STATE)
    second.save(2, STATE)
    first.close()
    assert (tmp_path / "lock").exists()
    second.close()
    assert not (tmp_path / "lock").exists()
    assert second.steps() == [1, 2]


def test_another_process_of_the_same_job_continues_after_the_death_of_rank_0(tmp_path, at_once):
    """Both know what rank 0 has drawn at the start."""
    locked_by(tmp_path, run=7)
    own = FolderLock(tmp_path, run=7)
    own.acquire()
    assert own.held()
    own.release()


def no_link(*_):
    raise PermissionError("this file system has no hard links")


def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", no_link)
    checkpoints = opened(tmp_path)
    checkpoints.save(1, STATE)
    assert (tmp_path / "lock").exists()
    checkpoints.close()


def test_a_lock_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "RENEW_SECONDS", 0.01)
    checkpoints = opened(tmp_path)
    checkpoints.claim()
    os.utime(tmp_path / "lock", (1, 1))
    until = time.monotonic() + 60
    while os.stat(tmp_path / "lock").st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert os.stat(tmp_path / "lock").st_mtime > 1
    checkpoints.close()


def test_a_reader_needs_no_lock(tmp_path, at_once):
    checkpoints = opened(tmp_path)
    checkpoints.save(1, STATE)
    checkpoints.close()
    locked_by(tmp_path)
    reader = opened(tmp_path)
    assert reader.restore(STATE).step == 1
    reader.close()
    assert json.loads((tmp_path / "lock").read_text())["host"] == "elsewhere"


@pytest.mark.parametrize("hard_links", [True, False])
def test_of_two_jobs_that_find_a_dead_lock_one_takes_it(tmp_path, monkeypatch, hard_links):
    if not hard_links:
        monkeypatch.setattr(os, "link", no_link)
    dead = Holder(run=1, host="gone", kernel="other", pid=1)
    (tmp_path / "lock").write_text(json.dumps(dead._asdict()))
    first, second = FolderLock(tmp_path, 2), FolderLock(tmp_path, 3)
    # Those of two processes.
    first._own, second._own = (
        lock._own._replace(pid=pid) for lock, pid in ((first, 1), (second, 2))
    )

    def finds(holder, own):
        if holder.run == 1 and own == first._own:
            second.acquire()  # after the first one has seen the dead lock
        return holder.run == 1

    def renewed(fake, seconds):
        fake.now += seconds
        os.utime(tmp_path / "lock")

    monkeypatch.setattr(folder, "is_dead", finds)
    clock(monkeypatch, renewed)
    with pytest.raises(JdasoError, match="process 2 on"):
        first.acquire()
    assert second.held()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    second.release()
