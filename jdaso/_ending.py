"""All processes end together, and each says why: one that is left alone would wait for ever."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from jdaso._last_resort import watch

# So long a process that ends all others lets them say why.
_TELLING_SECONDS = 1.0
_ABORT_SECONDS = 5.0
_STDERR = 2
# Of the threads of a process one ends it: two in MPI_Abort write to the launcher at once.
_ends = threading.Lock()


def end(comm: Any, reason: str, status: int) -> None:
    """Says why on stderr, and ends this process and, through MPI, all others."""
    if not _ends.acquire(blocking=False):
        threading.Event().wait()  # another thread does, or what it has set below
    # Should the rest not come to its end, this does: it needs neither MPI nor the interpreter.
    faulthandler.dump_traceback_later(_TELLING_SECONDS + _ABORT_SECONDS, exit=True, file=_STDERR)
    with contextlib.suppress(Exception):  # a terminal that is gone, a stream that is closed
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        # At once, or the lines of processes that end together run into each other.
        line = f"jdaso: ending all processes: {reason}\n"
        os.write(_STDERR, line.encode(errors="backslashreplace"))
    time.sleep(_TELLING_SECONDS)
    watch()
    _leave_at_once(status)
    comm.Abort(status)


def _leave_at_once(status: int) -> None:
    """Lets C's exit, in which MPI_Abort ends, wait for nothing: a library's threads may hang it."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.__cxa_atexit(libc._exit, ctypes.c_void_p(status), None)


def end_on_exception(who: str, end_all: Callable[[str], None]) -> None:
    """From now on an uncaught exception in this process ends all of them."""
    own = os.getpid()

    def hook(kind, error, trace):
        traceback.print_exception(kind, error, trace)
        if os.getpid() == own:  # and not a child that was forked
            end_all(f"{who} failed: {kind.__name__}: {error}")

    sys.excepthook = hook
