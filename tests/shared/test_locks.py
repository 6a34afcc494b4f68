"""A lock whose holder dies is free at once, and says what happened."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jdaso import JdasoError
from jdaso.shared._locks import NOBODY, Locks

HOLDER = Path(__file__).with_name("holder.py")


@pytest.fixture
def shared(tmp_path):
    """A path of a file with the marks of two locks, and the locks as rank 0 sees them."""
    path = tmp_path / "locks"
    path.write_bytes(bytes(16))
    holders = np.memmap(path, np.int64, "r+", shape=(2,))
    descriptor = os.open(path, os.O_RDWR)
    yield path, holders, Locks(descriptor, holders, 0, "rank {}".format, timeout=0.3)
    os.close(descriptor)


@contextlib.contextmanager
def other_process(path, case):
    """A process that holds lock 0; ends when its input is closed."""
    command = [sys.executable, str(HOLDER), str(path), case]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "holds\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_lock_is_held_marked_and_given_back(shared):
    _, holders, locks = shared
    with locks.hold(1):
        assert list(holders) == [NOBODY, 1]
    assert list(holders) == [NOBODY, NOBODY]


def test_who_waits_too_long_is_told_for_whom_and_other_locks_are_free(shared):
    path, _, locks = shared
    with other_process(path, "stays") as process:
        assert locks.is_alive(1)
        with locks.hold(1):
            pass
        with pytest.raises(JdasoError, match=r"waited 0.3 s for the lock of block 0: rank 1 holds"):
            locks.hold(0).__enter__()
        process.communicate(timeout=60)
        with locks.hold(0):
            pass
        assert not locks.is_alive(1)


def test_a_process_that_dies_with_a_lock_does_not_hold_up_others_but_is_named(shared):
    path, _, locks = shared
    with other_process(path, "dies") as process:
        process.communicate(timeout=60)
        assert process.returncode < 0
        for _ in range(2):  # whoever comes next is told, too
            with pytest.raises(JdasoError, match=r"rank 1 ended while it wrote to block 0"):
                locks.hold(0).__enter__()
        assert not locks.is_alive(1)


def test_a_write_that_was_broken_off_is_not_taken_for_done(shared):
    _, _, locks = shared
    with pytest.raises(KeyboardInterrupt), locks.hold(0):
        raise KeyboardInterrupt
    with pytest.raises(JdasoError, match=r"rank 0 ended while it wrote to block 0"):
        locks.hold(0).__enter__()
