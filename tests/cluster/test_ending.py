"""How a process ends: by an abort of one thread, after a signal, or normally."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import types

import pytest

import jdaso
from jdaso.cluster import Preemption, ending
from jdaso.cluster.ending import abort_on_exception, at_exit

TWO_THREADS = """
import os, threading, time
from jdaso.cluster import ending

def abort_mpi(status):
    print("aborted", flush=True)
    time.sleep(1)  # time for the other thread to abort as well
    os._exit(status)

ending._abort_mpi = abort_mpi
both = threading.Barrier(2)

def abort_with(status):
    both.wait()
    ending.abort(f"status {status}", status)

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
from jdaso.cluster import ending

# With the interpreter's lock, as in mpi4py.
ending._abort_mpi = lambda status: ctypes.PyDLL(None).pause()
ending._GRACE_SECONDS = ending._ABORT_SECONDS = 0.25
ending.abort("a node is lost", 69)
"""


def test_process_whose_abort_hangs_ends_with_the_status():
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 69
    assert done.stderr == "jdaso: ending all processes: a node is lost\n"


SHOWN = """
from jdaso.cluster import ending

ending._abort_mpi = lambda status: None
ending.on_exception(lambda error: ending.abort(f"rank 0 failed: {ending._plain(error)}", 1))
raise ValueError("too small")
"""


def test_the_log_has_the_error_that_python_has_printed(tmp_path):
    environment = os.environ | {"JDASO_LOG": str(tmp_path / "log")}
    run = [sys.executable, "-c", SHOWN]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stderr.endswith("jdaso: ending all processes: rank 0 failed: see the error above\n")
    (log,) = tmp_path.iterdir()
    said = log.read_text().partition(": ")[2]
    assert said == "ending all processes: rank 0 failed: ValueError: too small\n"


def test_the_reason_is_written_before_anything_that_may_take_time(monkeypatch, capfd):
    """A launcher that has noticed a death may kill this process at any moment."""

    def killed(*_):
        raise SystemExit

    monkeypatch.setattr(ending, "_aborting", threading.Lock())
    for name in ("_exit_later", "detect_launch", "_ignore_sigterm"):
        monkeypatch.setattr(ending, name, killed)
    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(flush=killed))
    with pytest.raises(SystemExit):
        ending.abort("the reason", 1)
    assert capfd.readouterr().err == "jdaso: ending all processes: the reason\n"


# MPI_Abort ends with 70 here. srun -K sends SIGTERM when the first process has exited.
UNDER_SRUN = """
import os, signal, threading, time
from jdaso.cluster import ending

os.environ |= dict.fromkeys(["SLURM_STEP_ID", "SLURM_PROCID", "PMI_FD"], "1")
os.environ["SLURM_STEP_NUM_TASKS"] = "3"
ending._GRACE_SECONDS = 0.5
ending._abort_mpi = lambda status: os._exit(70)
threading.Thread(target=ending.abort, args=("the reason", {status}, {all_abort})).start()
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
from jdaso.cluster.ending import abort_alone

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
    program = "from jdaso.cluster.ending import at_exit; at_exit(lambda: print('ran'))"
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
def test_an_error_of_the_host_is_named_without_the_words_of_xla(monkeypatch, capsys, error, plain):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    reasons = []
    abort_on_exception("rank 1", reasons.append)
    sys.excepthook(type(error), error, None)
    assert reasons == [f"rank 1 failed: {plain}"]
    assert str(error) in capsys.readouterr().err


SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXCHANGE = jdaso.single_exchange()


def own_handler(number, frame):
    pass


@pytest.fixture(autouse=True)
def restored():
    """The handlers from before the test. Within it, SIGTERM has one and SIGUSR1 has none."""
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    signal.signal(signal.SIGTERM, own_handler)
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_requests_a_stop_and_has_no_effect_after_it(number):
    with Preemption() as preemption:
        assert not preemption.requested(EXCHANGE)
        os.kill(os.getpid(), number)
        assert preemption.requested(EXCHANGE)
    assert own_handler not in map(signal.getsignal, SIGNALS)
    for again in SIGNALS:  # would end the process, or call the program's handler
        os.kill(os.getpid(), again)


def test_without_a_stop_handlers_return_and_sigusr1_is_ignored():
    with Preemption() as preemption:
        assert not preemption.requested(EXCHANGE)
    assert signal.getsignal(signal.SIGTERM) is own_handler
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_of_the_program_returns_for_sigusr1_as_well():
    signal.signal(signal.SIGUSR1, own_handler)
    with Preemption():
        pass
    assert signal.getsignal(signal.SIGUSR1) is own_handler


FORKS = """
import multiprocessing, os, signal, sys, time
from jdaso.cluster import Preemption, ending
import jdaso

def handlers(_=None):
    return [signal.getsignal(n).name for n in (signal.SIGTERM, signal.SIGUSR1)]

def sleep():
    time.sleep(1000)

fork = multiprocessing.get_context("fork")
if sys.argv[1] == "inside":
    with Preemption(), Preemption():
        child = fork.Process(target=sleep)
        child.start()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM
        with fork.Pool(2) as pool:
            assert pool.map(handlers, range(2)) == [["SIG_DFL", "SIG_DFL"]] * 2
        pool.join()
elif sys.argv[1] == "after":
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested(jdaso.single_exchange())
    with fork.Pool(1) as pool:
        assert pool.map(handlers, range(1)) == [["SIG_DFL", "SIG_DFL"]]
    pool.join()
elif sys.argv[1] == "own":
    with Preemption():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
elif sys.argv[1] == "daemon":
    with Preemption():
        fork.Process(target=sleep, daemon=True).start()
print("end", flush=True)
"""


@pytest.mark.parametrize("where", ["inside", "after", "own", "daemon"])
def test_forked_children_have_the_handlers_from_before(where):
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS, where],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as program:
        try:
            output, _ = program.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    assert (program.returncode, output) == (0, "end\n")


RAISES = """
import os, sys
from jdaso.cluster import ending

ending._GRACE_SECONDS = 0.0
ending._abort_mpi = os._exit
{hook}
ending.abort_on_exception("rank 1", lambda reason: ending.abort(reason, 7))
raise ValueError("too large")
"""


@pytest.mark.parametrize(
    ("hook", "last"),
    [
        ("", "jdaso: ending all processes: rank 1 failed: see the error above"),
        (
            "sys.excepthook = lambda *error: None",  # which may send the error anywhere
            "jdaso: ending all processes: rank 1 failed: ValueError: too large",
        ),
    ],
)
def test_an_error_is_printed_once(hook, last):
    program = RAISES.format(hook=hook)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7
    assert done.stderr.count("ValueError: too large") == 1
    assert done.stderr.splitlines()[-1] == last


def test_the_traceback_of_an_error_that_was_said_keeps_its_type(capsys, monkeypatch):
    monkeypatch.setattr(ending, "_said", set())
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(ending, "_shown", "")
    ending.on_exception(lambda error: None)
    ending.say_once("rank 1", "JdasoError: too late")
    error = jdaso.JdasoError("too late")
    sys.excepthook(type(error), error, None)
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "jdaso.core.types.JdasoError: see the error above"


@pytest.mark.parametrize("times", [1, 2])
def test_the_programs_excepthook_is_called_once_before_the_abort(monkeypatch, times):
    calls = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: calls.append(error))
    for _ in range(times):
        abort_on_exception("rank 1", calls.append)
    error = ValueError("wrong")
    sys.excepthook(ValueError, error, None)
    assert calls == [(ValueError, error, None), "rank 1 failed: ValueError: wrong"]
    monkeypatch.setattr(os, "getpid", lambda: -1)  # in a forked child
    sys.excepthook(ValueError, error, None)
    assert calls[2:] == [(ValueError, error, None)]


def test_an_excepthook_that_fails_does_not_prevent_the_abort(monkeypatch, capsys):
    def hook(*error):
        raise SystemExit("the reporter cannot be reached")

    monkeypatch.setattr(sys, "excepthook", hook)
    reasons = []
    abort_on_exception("rank 1", reasons.append)
    sys.excepthook(ValueError, ValueError("wrong"), None)
    assert reasons == ["rank 1 failed: ValueError: wrong"]
    assert "the reporter cannot be reached" in capsys.readouterr().err
