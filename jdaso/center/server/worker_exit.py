"""How a worker exits without stopping the others, also where MPI would wait for a dead process."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdaso.center.server.liveness import Liveness
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger


class WorkerExit(NamedTuple):
    """How a worker leaves the training.

    Attributes:
        abort: Ends this worker for a reason, with or without the others.
        finish: Called with the workers that are gone, when all others have ended.
        failed: Returns whether this worker ends by an exception.
    """

    abort: Callable[[str], None]
    finish: Callable[[Sequence[int]], None]
    failed: Callable[[], bool]


def with_server(topology: Topology) -> WorkerExit:
    """Returns the exit of node 0, whose failure aborts the job; its server exits last."""
    return WorkerExit(topology.abort, finish=lambda gone: None, failed=lambda: False)


def without_server(topology: Topology) -> WorkerExit:
    """Returns the exit of the other nodes, whose exceptions do not stop the others."""
    status = [0]

    def hook(kind, error, trace):
        status[0] = 1
        sys.stdout.flush()
        own = topology.describe(topology.rank)
        logger.error("%s failed; the others continue.", own, exc_info=(kind, error, trace))

    sys.excepthook = hook
    return WorkerExit(
        abort=_exit_now,
        finish=lambda gone: _exit_without(topology, gone, status[0]),
        failed=lambda: status[0] != 0,
    )


def server_exit(topology: Topology, liveness: Liveness) -> Callable[[object], None]:
    """Returns the exit of the server's progress thread, after its workers, which know of it."""
    return lambda progress: _exit_without(topology, sorted(liveness.gone), 0)


def _exit_now(reason: str) -> None:
    sys.stdout.flush()
    logger.error("%s The others continue.", reason)
    os._exit(1)


def ignore_death_signal() -> None:
    """Ignores SIGUSR1, with which MPICH's launcher reports a death, unless it has a handler."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _exit_without(topology: Topology, gone: Sequence[int], status: int) -> None:
    """Exits without finalizing MPI if workers are gone, because MPI would wait for them."""
    if gone:
        if topology.heartbeat is not None:
            topology.heartbeat.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
