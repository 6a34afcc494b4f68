"""Aborting a process: only one thread does it, with its own status. Forked children skip it."""

import atexit
import os
import subprocess
import sys

import pytest

from jdaso.cluster.abort import _plain, at_exit

TWO_THREADS = """
import os, threading, time
from jdaso.cluster import abort

def abort_mpi(status):
    print("aborted", flush=True)
    time.sleep(1)  # time for the other thread to abort as well
    os._exit(status)

abort._abort_mpi = abort_mpi
both = threading.Barrier(2)

def abort_with(status):
    both.wait()
    abort.abort(f"status {status}", status)

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

# With the interpreter's lock, as in mpi4py.
abort._abort_mpi = lambda status: ctypes.PyDLL(None).pause()
abort._GRACE_SECONDS = abort._ABORT_SECONDS = 0.25
abort.abort("a node is lost", 69)
"""


def test_process_whose_abort_hangs_ends_with_the_status():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 69
    assert done.stderr == "jdaso: ending all processes: a node is lost\n"


# MPI_Abort ends with 70 here. srun -K sends SIGTERM when the first process has exited.
UNDER_SRUN = """
import os, signal, threading, time
from jdaso.cluster import abort

os.environ |= dict.fromkeys(["SLURM_STEP_ID", "SLURM_PROCID", "PMI_FD"], "1")
os.environ["SLURM_STEP_NUM_TASKS"] = "3"
abort._GRACE_SECONDS = 0.5
abort._abort_mpi = lambda status: os._exit(70)
threading.Thread(target=abort.abort, args=("the reason", {status}, {all_abort})).start()
if {status} == 1 and {all_abort}:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("status", "all_abort", "ends_with"), [(1, True, 1), (1, False, 70), (69, True, 70)]
)
def test_under_srun_processes_that_all_abort_exit_by_themselves(status, all_abort, ends_with):
    program = UNDER_SRUN.format(status=status, all_abort=all_abort)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == ends_with, done.stderr


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


@pytest.mark.parametrize(
    ("error", "plain"),
    [
        (ValueError("INTERNAL: JdasoError: rank 1 is late"), "JdasoError: rank 1 is late"),
        (
            RuntimeError("INTERNAL: CpuCallback error: Traceback:\n  call\nJdasoError: late\n\n"),
            "JdasoError: late",
        ),
        (ValueError("of the user\nin two lines"), "ValueError: of the user\nin two lines"),
    ],
)
def test_an_error_of_the_host_is_named_without_the_words_of_xla(error, plain):
    assert _plain(error) == plain
