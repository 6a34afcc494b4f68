"""How a job ends: what a death does, an abort of all processes, a stop at one step, a normal exit.

The heartbeat notices a death, and asks the :class:`DeathPolicy` whether the others go on. If not,
:func:`abort` ends each process. Exit statuses tell a job script whether to start the job again.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

from jdaso.cluster.launchers import detect_launch, start_watchdog
from jdaso.core.exchange import Exchange
from jdaso.core.log import logger, record

#: Exit status when a process has died or was silent for too long: EX_UNAVAILABLE of sysexits.h.
EXIT_NODE_LOST = 69
#: Exit status of a training that has saved a checkpoint and is to be started again: EX_TEMPFAIL
#: of sysexits.h. A batch script can tell it from success and from an error.
EXIT_TRY_AGAIN = 75

# The aborting process waits this long before MPI_Abort, so that the others can print the reason.
_GRACE_SECONDS = 1.0
_ABORT_SECONDS = 5.0
_STDERR = 2
_NEW_THREAD = 2  # SIGEV_THREAD
# Only one thread aborts: two threads in MPI_Abort would write to the launcher at the same time.
_aborting = threading.Lock()


class DeathPolicy(NamedTuple):
    """What the death of another process does to this one, see :meth:`Topology.follow`.

    A death ends the job, unless a policy has a function for it and none needs the process. An
    exchange needs all of its processes. The workers of a center go on without one another, but not
    without rank 0, which has the server. Rank 0 receives all heartbeats, so its death ends any job.

    Attributes:
        needed: The ranks whose deaths end the job.
        on_death: Called with the rank of each other process that has died.
    """

    needed: frozenset[int]
    on_death: Callable[[int], object] | None = None


def abort(reason: str, status: int, all_abort: bool = True) -> None:
    """Prints the reason to stderr, then ends this process and all others.

    Launchers report different statuses of the job. MPICH's mpiexec and Open MPI report ``status``
    if MPI_Abort is called with MPI_COMM_WORLD. With another communicator, MPICH tells its mpiexec
    nothing, which then kills the other processes and reports that signal, or hangs. Where the table
    of launchers says that MPI_Abort hides the status, with status 1 and if the reason was sent to
    all processes (``all_abort``), this process does not call it. It ignores SIGTERM, which
    ``srun -K`` sends, and exits with the status itself, as the others do. A launcher that itself
    notices a dead process first reports its signal (9 or 137).
    """
    if not _aborting.acquire(blocking=False):
        threading.Event().wait()  # until the other thread has ended the process
    # First, because a launcher that has noticed a death may kill this process at any moment.
    text = f"ending all processes: {reason}"
    seen = _shown and reason.endswith(_shown)
    _write(text.removesuffix(_shown) + "see the error above" if seen else text)
    _exit_later(status, _GRACE_SECONDS + _ABORT_SECONDS)  # if the code below hangs
    record(text)
    exits = status == 1 and all_abort and detect_launch(os.environ).launcher.exits
    if exits:
        _ignore_sigterm()
    with contextlib.suppress(Exception):  # the terminal is gone, or the stream is closed
        sys.stdout.flush()
    time.sleep(_GRACE_SECONDS)
    if exits:
        os._exit(status)
    start_watchdog()
    _abort_mpi(status)


def _abort_mpi(status: int) -> None:
    # MPI_Abort calls C's exit. This makes it end at once, because other exit handlers may hang.
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(status), None)
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(status)


def abort_alone(reason: str) -> None:
    """Ends this process, the only one of its job, with status 1."""
    if threading.current_thread() is threading.main_thread():
        raise SystemExit(reason)
    # SystemExit ends the main thread only. A program of several devices would wait for this one.
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    _write(f"ending this process: {reason}")
    record(f"ending this process: {reason}")
    os._exit(1)


def _write(text: str) -> None:
    """Writes a line to stderr."""
    with contextlib.suppress(OSError):
        # One system call, because the lines of several processes must not mix.
        os.write(_STDERR, f"jdaso: {text}\n".encode(errors="backslashreplace"))


class _Event(ctypes.Structure):
    """``struct sigevent`` of glibc and musl, with a function that a new thread calls."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("rest", ctypes.c_char * 40),
    )


def _exit_later(status: int, seconds: float) -> None:
    """Ends this process after some seconds. Needs neither MPI nor the interpreter.

    MPI_Abort holds the interpreter's lock while it hangs, so no Python code runs then. The C
    library's timer calls ``_exit`` with the status. ``faulthandler`` could do the same with the
    status 1 only, for which job scripts do not start a job again.
    """
    try:
        libc = ctypes.CDLL(None)
        timers = libc if hasattr(libc, "timer_create") else ctypes.CDLL("librt.so.1")  # old glibc
        exit_function = ctypes.cast(libc._exit, ctypes.c_void_p)
        event = _Event(value=status, notify=_NEW_THREAD, function=exit_function)
        timer, limit = ctypes.c_void_p(), (ctypes.c_long * 4)()  # interval and time
        limit[2], limit[3] = int(seconds), int(seconds % 1 * 1e9)
        created = timers.timer_create(
            time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)
        )
        if created == 0 and timers.timer_settime(timer, 0, ctypes.byref(limit), None) == 0:
            return
    except (OSError, AttributeError):  # another C library
        pass
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)


def _ignore_sigterm() -> None:
    """Works in any thread, unlike ``signal.signal``."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(int(signal.SIG_IGN)))


def abort_on_exception(process_name: str, abort_all: Callable[[str], None]) -> None:
    """From now on an uncaught exception in this process calls ``abort_all`` with the reason."""
    on_exception(lambda error: abort_all(f"{process_name} failed: {_plain(error)}"))


def on_exception(function: Callable[[BaseException], object]) -> None:
    """From now on an uncaught exception in this process calls ``function``, and no other one.

    The program's own ``sys.excepthook`` is called before, also in forked children. By default it
    prints the traceback.
    """
    sys.excepthook = _ExceptionHook(function)


_shown = ""  # the error that Python has printed
_said: set[str] = set()


def say_once(name: str, error: str) -> None:
    """Prints the error of a process at once, which the program may raise later, or never."""
    if error not in _said:
        _said.add(error)
        logger.error("%s failed: %s", name, error)


class _ExceptionHook:
    def __init__(self, function: Callable[[BaseException], object]):
        present = sys.excepthook
        self._programs: Callable[..., Any] = (
            present._programs if isinstance(present, _ExceptionHook) else present
        )
        self._function, self._process = function, os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        shown = _plain(error) if self._programs is sys.__excepthook__ else ""
        try:
            if shown in _said:
                text = "".join(traceback.format_exception(error))
                seen = f"{shown.partition(':')[0]}: see the error above"
                print(text.replace(shown, seen), end="", file=sys.stderr)
            else:
                self._programs(kind, error, trace)
        except BaseException:  # the job must end nevertheless
            traceback.print_exc()  # has the error as its context
        if os.getpid() == self._process:
            global _shown
            _shown = shown
            self._function(error)


def _plain(error: BaseException) -> str:
    """Returns type and message of an error, without what XLA adds to that of a host callback."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # an error in the text of an error must not keep the job alive
        text = type(error).__name__
    said = re.search(r"JdasoError: .*", text)
    return said[0] if said and ": INTERNAL: " in text else text


_at_exit: list[Callable[[], None]] = []


def at_exit(function: Callable[[], object]) -> Callable[[], None]:
    """Runs ``function`` when this process exits, but no forked child. The result cancels this.

    If the program itself finalizes MPI, :func:`run_exit_functions` does it before.
    """
    own = os.getpid()

    def run() -> None:
        cancel()
        if os.getpid() == own:
            function()

    def cancel() -> None:
        atexit.unregister(run)
        with contextlib.suppress(ValueError):  # another thread was faster
            _at_exit.remove(run)

    atexit.register(run)
    _at_exit.append(run)
    return cancel


def run_exit_functions() -> None:
    """Runs what :func:`at_exit` was given, in the order in which it would run at exit."""
    while _at_exit:
        try:
            _at_exit[-1]()
        except Exception:
            traceback.print_exc()  # as atexit does; the others still run


# The handlers of signals that have one of a Preemption now, or are ignored after its block.
_programs_handlers: dict[int, Any] = {}


@functools.cache  # once per process
def _reset_in_forked_children() -> None:
    of_thread = threading.local()

    def block() -> None:
        # A child that gets a signal at once must have its own handlers first.
        of_thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _programs_handlers)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, of_thread.mask)

    def reset() -> None:
        for number, handler in _programs_handlers.items():
            present = signal.getsignal(number)
            owner = getattr(present, "__self__", None)
            if present is signal.SIG_IGN or isinstance(owner, Preemption):  # not the program's
                signal.signal(number, handler)
        _programs_handlers.clear()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=reset)


class Preemption:
    """Reports whether a signal has asked one of the nodes to stop.

    Slurm warns a job of its time limit with a signal (``--signal=USR1@120``), and preempts it with
    SIGTERM. The signal reaches the nodes at different steps. So each node asks the others at every
    step, and reads the answer a few steps later. No node waits for one that is behind by fewer
    steps than that, and all nodes stop at the same step.

    Inside the ``with`` block the signals have no other effect. If a stop was requested, they have
    none after the block either: a launcher may send SIGTERM to a node that is still exiting, and
    its exit status must not change. SIGUSR1, which kills a process by default, is ignored after the
    block in any case, because it may arrive after the last step. Forked children, such as those of
    ``multiprocessing``, have the handlers from before the block, so that they can be terminated.

    Args:
        signals: Signals that request a stop.

    >>> import jdaso
    >>> with Preemption() as preemption:
    ...     preemption.requested(jdaso.single_exchange())
    False
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)):
        self._signals = tuple(signals)
        self._received = False
        self._requested = False

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, self._on_signal) for number in self._signals]
        _reset_in_forked_children()
        for number, handler in zip(self._signals, self._before, strict=True):
            _programs_handlers.setdefault(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        if self._requested:
            return
        for number, handler in zip(self._signals, self._before, strict=True):
            kills = number == signal.SIGUSR1 and handler is signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if kills else handler)
            if not kills and _programs_handlers.get(number) is handler:
                del _programs_handlers[number]

    def requested(self, exchange: Exchange) -> bool:
        """Whether to save and stop now. All nodes must call it at the same steps.

        Over MPI, all nodes return True at the fourth call after the one that passes a signal on.
        """
        self._requested = exchange.any_node(self._received)
        return self._requested

    def _on_signal(self, number: int, frame: object) -> None:
        self._received = True
