"""Signals that ask for an end, heard by one node and heeded by all at the same step."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from jdaso._base import Exchange

#: Exit status of a training that has saved and wants to be started again: EX_TEMPFAIL of
#: sysexits.h, "try again later". A batch script can tell it from success and from an error.
EXIT_TRY_AGAIN = 75


class Interruption:
    """Whether a signal has asked one of the nodes to stop.

    Slurm warns a job of its time limit with a signal (``--signal=USR1@120``) and preempts it with
    SIGTERM; the nodes do not hear it at the same step. So each asks the others at every step, and
    takes the answer some steps later: no node waits for one that is slower by less than these,
    and all stop at the same one.

    Args:
        signals: what to listen to; inside the ``with`` block they do nothing else. After one
            was heeded that stays so: a launcher may send SIGTERM to a node that is still about
            to end because another one has ended, and would take that for its exit status. SIGUSR1,
            which by default kills, does nothing afterwards in any case: a warning that comes after
            the last step shall not end what is left to do.

    >>> import jdaso
    >>> with Interruption() as interruption:
    ...     interruption.wanted(jdaso.single_exchange())
    False
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)):
        self._signals = tuple(signals)
        self._asked = False
        self._wanted = False

    def __enter__(self) -> Interruption:
        self._before = [signal.signal(number, self._hear) for number in self._signals]
        return self

    def __exit__(self, *error: object) -> None:
        if self._wanted:
            return
        for number, handler in zip(self._signals, self._before, strict=True):
            kills = number == signal.SIGUSR1 and handler is signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if kills else handler)

    def wanted(self, exchange: Exchange) -> bool:
        """Whether to save and stop now; all nodes must call it at the same steps.

        Over MPI all know of a signal at the fourth call after the one that passes it on.

        Args:
            exchange: over which nodes tell each other.
        """
        self._wanted = exchange.anyone(self._asked)
        return self._wanted

    def _hear(self, number: int, frame: object) -> None:
        del number, frame
        self._asked = True
