"""A lock whose holder dies is released, and the next process gets an error that names it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jdaso import JdasoError
from jdaso.passm.memory import NO_HOLDER, Locks

HOLDER = Path(__file__).parents[1] / "support" / "lock_holder.py"


@pytest.fixture
def shared(tmp_path):
    """A file with the holders of two locks, the holders, and the locks of rank 0."""
    path = tmp_path / "locks"
    path.write_bytes(bytes(16))
    holders = np.memmap(path, np.int64, "r+", shape=(2,))
    descriptor = os.open(path, os.O_RDWR)
    yield path, holders, Locks(descriptor, holders, 0, "rank {}".format, timeout=0.3)
    os.close(descriptor)


@contextlib.contextmanager
def other_process(path, case):
    """A process that holds lock 0 until its input is closed."""
    command = [sys.executable, str(HOLDER), str(path), case]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_lock_is_held_with_its_holder_and_released(shared):
    _, holders, locks = shared
    with locks.acquire(1):
        assert list(holders) == [NO_HOLDER, 1]
    assert list(holders) == [NO_HOLDER, NO_HOLDER]


def test_the_error_after_a_timeout_names_the_holder_and_other_locks_are_free(shared):
    path, _, locks = shared
    with other_process(path, "stays") as process:
        assert locks.is_alive(1)
        with locks.acquire(1):
            pass
        with pytest.raises(JdasoError, match=r"waited 0.3 s .* leaves of process 0: rank 1 holds"):
            locks.acquire(0).__enter__()
        process.communicate(timeout=60)
        with locks.acquire(0):
            pass
        assert not locks.is_alive(1)


def test_a_process_that_dies_with_a_lock_does_not_block_others_and_is_named(shared):
    path, _, locks = shared
    with other_process(path, "dies") as process:
        process.communicate(timeout=60)
        assert process.returncode < 0
        for _ in range(2):  # every later process gets the error
            with pytest.raises(
                JdasoError, match=r"rank 1 ended while it wrote the leaves of process 0"
            ):
                locks.acquire(0).__enter__()
        assert not locks.is_alive(1)


def test_a_write_that_raised_is_not_taken_for_complete(shared):
    _, _, locks = shared
    with pytest.raises(KeyboardInterrupt), locks.acquire(0):
        raise KeyboardInterrupt
    with pytest.raises(JdasoError, match=r"rank 0 ended while it wrote the leaves of process 0"):
        locks.acquire(0).__enter__()
