"""Aborting a process: only one thread does it, with its own status. Forked children skip it."""

import atexit
import os
import subprocess
import sys

import pytest

from jdaso.cluster.abort import at_exit

TWO_THREADS = """
import os, threading, time
from jdaso.cluster.abort import abort

class Comm:
    def Abort(self, status):
        print("aborted", flush=True)
        time.sleep(1)  # time for the other thread to abort as well
        os._exit(status)

both = threading.Barrier(2)

def abort_with(status):
    both.wait()
    abort(Comm(), f"status {status}", status)

threading.Thread(target=abort_with, args=(70,)).start()
abort_with(71)
"""


def test_only_one_of_two_threads_aborts():
    done = subprocess.run(
        [sys.executable, "-c", TWO_THREADS], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (70, 71)
    assert done.stdout == "aborted\n"
    assert done.stderr == f"jdaso: ending all processes: status {done.returncode}\n"


HANGS = """
import ctypes
from jdaso.cluster import abort

class Comm:
    def Abort(self, status):
        ctypes.PyDLL(None).pause()  # with the interpreter's lock, as in mpi4py

abort._GRACE_SECONDS = abort._ABORT_SECONDS = 0.25
abort.abort(Comm(), "a node is lost", 69)
"""


def test_process_whose_abort_hangs_ends_with_the_status():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 69
    assert done.stderr == "jdaso: ending all processes: a node is lost\n"


ALONE = """
import threading
from jdaso.cluster.abort import abort_alone

print("begun")
thread = threading.Thread(target=abort_alone, args=("the reason",))
{start}
"""


@pytest.mark.parametrize(
    "start", ["thread.start(); threading.Event().wait()", "abort_alone('the reason')"]
)
def test_process_without_others_ends_from_any_thread(start):
    program = ALONE.format(start=start)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "begun\n")
    assert "the reason" in done.stderr


def test_function_that_is_forgotten_does_not_run_at_exit():
    program = "from jdaso.cluster.abort import at_exit; at_exit(lambda: print('ran'))"
    for forget, printed in (("", "ran\n"), ("()", "")):
        done = subprocess.run(
            [sys.executable, "-c", program + forget], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == printed, done.stderr


def test_forked_child_skips_exit_functions(monkeypatch):
    done, registered = [], []
    monkeypatch.setattr(atexit, "register", registered.append)
    at_exit(lambda: done.append(1))
    (function,) = registered
    function()
    assert done == [1]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    function()
    assert done == [1]
