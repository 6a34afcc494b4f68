"""How a worker ends without ending the others, also where MPI would wait for one that is dead."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from jdaso.center._presence import Presence
from jdaso.topology import Topology


class Departure:
    """What the process of the server does when it has served: see ``Ending`` of a progress thread.

    Args:
        topology: who the others are.
        presence: who was there.
    """

    def __init__(self, topology: Topology, presence: Presence):
        self._topology = topology
        self._presence = presence

    def gone(self) -> frozenset[int]:
        """Nobody: the server outlives its workers."""
        return frozenset()

    def say(self) -> None:
        """All that can be told have been."""
        _end_without(self._topology, sorted(self._presence.gone), 0)


def stay(gone: Sequence[int]) -> None:
    """What node 0 does at exit as a worker: nothing, as its server ends later."""
    del gone


def ending_alone(topology: Topology) -> tuple[Callable[[Sequence[int]], None], Callable[[], bool]]:
    """Lets this worker end by an exception without ending the others.

    Returns:
        ``(gone)``, what it does when all have ended, without those that are gone; and whether it
        has failed.
    """
    status = [0]

    def hook(kind, error, trace):
        status[0] = 1
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stdout.flush()
        who = topology.describe(topology.rank)
        print(f"{text}jdaso: {who} failed; the others go on.", file=sys.stderr, flush=True)

    sys.excepthook = hook
    return lambda gone: _end_without(topology, gone, status[0]), lambda: status[0] != 0


def end_alone(reason: str) -> None:
    """Ends this worker at once, and no other."""
    sys.stdout.flush()
    print(f"jdaso: {reason} The others go on.", file=sys.stderr, flush=True)
    os._exit(1)


def outlive() -> None:
    """Ignores the signal by which MPICH's launcher tells of a death, unless it is handled."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_without(topology: Topology, gone: Sequence[int], status: int) -> None:
    """Ends the process without finalizing MPI, which would wait for those that are gone."""
    if gone:
        if topology.heartbeat is not None:
            topology.heartbeat.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
