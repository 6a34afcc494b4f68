"""The communicators of one exchange, and how its processes close it together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from jdaso.cluster.roll_call import Call
from jdaso.cluster.topology import Topology
from jdaso.exchange.transport.communicators import ExchangeCommunicators
from jdaso.exchange.transport.handshake import exit_barrier

if TYPE_CHECKING:
    from jdaso.exchange.transport.progress import Progress

# Operations that the processes post in the same order.
SERIES = ("exchanges", "comparisons", "broadcasts", "flags", "exits")


class Membership:
    """The communicators of one exchange, and the counts of the operations that they carry."""

    def __init__(self, topology: Topology, chunk_bytes: int):
        self.topology = topology
        self._roll_call = topology.heartbeat and topology.heartbeat.roll_call
        self._series = {name: self._roll_call.new_series() for name in SERIES if self._roll_call}
        self.exchanges = ExchangeCommunicators(topology, chunk_bytes)
        # All processes must post the operations of one communicator in the same order. The order
        # between kinds depends on timing, so each kind has its own communicator.
        self.comparisons = topology.duplicate_comm()
        # Each process broadcasts the shards of its local rank.
        self.broadcasts = topology.across_nodes()
        self.flags = topology.duplicate_comm()  # of ``any_true``

    def free(self) -> None:
        """Frees all communicators; collective over all processes."""
        for comm in [*self.exchanges.all(), self.comparisons, self.broadcasts, self.flags]:
            comm.Free()

    def call(self, series: str) -> Call | None:
        """Counts an operation of one of ``SERIES`` that this process posts."""
        return self._roll_call.post(self._series[series]) if self._roll_call else None

    def announce_exit(self, progress: Progress) -> None:
        """Announces that this process closes the exchange, in ``close`` or at exit.

        Waits until all processes close it as well. MPI_Finalize also waits for them, but occupies a
        core meanwhile. If one of them dies instead, the heartbeat ends this process.
        """
        call = self.call("exits")
        if self._roll_call:
            for series in self._series.values():
                self._roll_call.close(series)
        barrier = exit_barrier(self.exchanges.handshakes)
        own = self.topology.describe(self.topology.rank)
        name = f"the closing of an exchange, by {own},"
        request = progress.submit(barrier, name, call=call, last=True)
        request.wait(_in_other_thread)


def _in_other_thread() -> bool:
    """Whether the main thread may post other operations while this thread waits."""
    return threading.current_thread() is not threading.main_thread()
