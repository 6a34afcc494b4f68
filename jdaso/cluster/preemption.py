"""Stops a training at the same step on all nodes after a signal has reached one of them."""

import signal
from collections.abc import Sequence
from typing import Self

from jdaso.core.exchange import Exchange

#: Exit status of a training that has saved a checkpoint and is to be started again: EX_TEMPFAIL
#: of sysexits.h. A batch script can tell it from success and from an error.
EXIT_TRY_AGAIN = 75


class Preemption:
    """Reports whether a signal has asked one of the nodes to stop.

    Slurm warns a job of its time limit with a signal (``--signal=USR1@120``), and preempts it with
    SIGTERM. The signal reaches the nodes at different steps. So each node asks the others at every
    step, and reads the answer a few steps later. No node waits for one that is behind by fewer
    steps than that, and all nodes stop at the same step.

    Inside the ``with`` block the signals have no other effect. If a stop was requested, they have
    none after the block either: a launcher may send SIGTERM to a node that is still exiting, and
    its exit status must not change. SIGUSR1, which kills a process by default, is ignored after the
    block in any case, because it may arrive after the last step.

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
        return self

    def __exit__(self, *error: object) -> None:
        if self._requested:
            return
        for number, handler in zip(self._signals, self._before, strict=True):
            kills = number == signal.SIGUSR1 and handler is signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if kills else handler)

    def requested(self, exchange: Exchange) -> bool:
        """Whether to save and stop now. All nodes must call it at the same steps.

        Over MPI, all nodes return True at the fourth call after the one that passes a signal on.
        """
        self._requested = exchange.any_node(self._received)
        return self._requested

    def _on_signal(self, number: int, frame: object) -> None:
        self._received = True
