"""The processes that are alive, and their communicators."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.roll_call import Call
from jdaso.cluster.topology import Topology
from jdaso.exchange.transport.collectives import AllReduceOptions
from jdaso.exchange.transport.communicators import ExchangeCommunicators
from jdaso.exchange.transport.handshake import exit_barrier
from jdaso.exchange.transport.operation import Operation
from jdaso.exchange.transport.shrink import CompletionLog, RepairWatchdog, repair
from jdaso.exchange.transport.ulfm import has_failed

if TYPE_CHECKING:
    from jdaso.exchange.transport.progress import Progress

# Operations that the processes post in the same order.
SERIES = ("exchanges", "comparisons", "broadcasts", "flags", "exits")


class Membership:
    """Replaces all communicators after the death of a process, if the job ``shrinks``.

    A repair fails after ``timeout`` seconds.
    """

    def __init__(
        self, topology: Topology, options: AllReduceOptions, timeout: float, shrinks: bool = False
    ):
        self._options = options
        self._log, self._watchdog = None, None
        if shrinks:
            self._log, self._watchdog = CompletionLog(), RepairWatchdog(timeout)
        self._roll_call = topology.heartbeat and topology.heartbeat.roll_call
        self._series = {name: self._roll_call.new_series() for name in SERIES if self._roll_call}
        self.initial = topology  # all processes at the start
        self._connect(topology)

    @property
    def shrinks(self) -> bool:
        return self._log is not None

    def needs_repair(self) -> bool:
        """Whether a process has died, or another process has started a repair."""
        return self.shrinks and has_failed(self.comparisons)

    def repair(self) -> Topology:
        """Connects the remaining processes by new communicators; collective over them."""
        assert self._watchdog is not None
        repair(self.topology, self._communicators(), self._reconnect, self._watchdog)
        return self.topology

    def free(self) -> None:
        """Frees all communicators; collective over the processes that are alive."""
        own = [self.topology.comm] if self.shrinks else []  # made for this exchange alone
        for comm in filter(None, [*self._communicators(), *own]):
            comm.Free()

    def call(self, series: str) -> Call | None:
        """Counts an operation of one of ``SERIES`` that this process posts."""
        return self._roll_call.post(self._series[series]) if self._roll_call else None

    def announce_exit(self, progress: Progress) -> None:
        """Announces that this process closes the exchange, in ``close`` or at exit.

        Waits until all processes that are alive close it as well. MPI_Finalize also waits for them,
        but occupies a core meanwhile. If one of them dies instead, the heartbeat ends this process,
        unless the job ``shrinks``.
        """
        call = self.call("exits")
        if self._roll_call:
            for series in self._series.values():
                self._roll_call.close(series)
        barrier = self.repeated(
            lambda: exit_barrier(self.exchanges.handshakes),
            lambda: self.exchanges.handshakes,
            "exits",
        )
        own = self.topology.describe(self.topology.rank)
        name = f"the closing of an exchange, by {own},"
        request = progress.submit(barrier, name, call=call, last=True)
        request.wait(_in_other_thread)

    def _communicators(self) -> list[Comm]:
        return [*self.exchanges.all(), self.comparisons, self.broadcasts, self.flags]

    def repeated(
        self, make: Callable[[], Operation], comm: Callable[[], Comm | None], queue: str
    ) -> Operation:
        """An operation that is repeated after a repair; see ``CompletionLog.until_complete``."""
        return make() if self._log is None else self._log.until_complete(make, comm, queue)

    def _connect(self, topology: Topology) -> None:
        self.topology = topology  # the processes that are alive
        self.exchanges = ExchangeCommunicators(topology, self._options)
        # All processes must post the operations of one communicator in the same order. The order
        # between kinds depends on timing, so each kind has its own communicator.
        self.comparisons = topology.duplicate_comm()
        # Joined processes broadcast the shards of their local rank.
        joined = next(filter(None, topology.group_communicators())) if topology.joined else None
        self.broadcasts = joined or topology.duplicate_comm()
        self.flags = topology.duplicate_comm()  # of ``any_true``

    def _reconnect(self, topology: Topology) -> None:
        assert self._log is not None
        assert topology.comm is not None
        self._connect(topology)
        self._log.share(topology.comm)


def _in_other_thread() -> bool:
    """Whether the main thread may post other operations while this thread waits."""
    return threading.current_thread() is not threading.main_thread()
