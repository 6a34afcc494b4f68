"""A worker's side of a center over MPI: each slot is a message, and its reply are the sums."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jdaso.center.server import frames
from jdaso.center.server.connection import Connection
from jdaso.center.types import reply_header
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.exchange.host.layout import Memory
from jdaso.exchange.host.program import abort_on_error, report_error
from jdaso.exchange.host.slots import Table
from jdaso.exchange.transport.progress import Operation

_POSTED_TWICE = (
    "{} with the center was posted twice in %s: one optimizer state was stepped twice (as "
    "optax.MultiSteps does), or two states share this center. To return to an earlier state, call "
    "tx.init first."
)
_NOT_IN_FLIGHT = (
    "{} with the center is not in flight in %s: the optimizer state is from before a restart, or "
    "was stepped twice. Call jdaso.drain before saving."
)


def worker_table(topology: Topology) -> Table:
    """The slots of a worker's exchanges with the center, with the errors that they report."""
    name = topology.describe(topology.rank)
    return Table(_POSTED_TWICE % name, _NOT_IN_FLIGHT % name)


class WorkerTransport:
    """Serves the slots of a worker: each is a message to the server, and its reply are the sums.

    ``abort(reason)`` ends this worker.
    """

    def __init__(self, topology: Topology, connection: Connection, abort: Callable[[str], None]):
        self._topology = topology
        self._connection = connection
        self._abort = abort
        self._name = topology.describe(topology.rank)
        self.rule_name = ""  # of the rule that the server must apply
        self._table = connection.progress.table
        self.restart_numbers, self.report = self._table.restart, self._table.report
        connection.progress.exchanges = self

    def ask(self, kind: int, content: Any) -> np.ndarray:
        """Sends a request other than an exchange, and waits for the content of its reply."""
        description = f"a request to the center, sent by {self._name},"
        operation = self._connection.request(kind, frames.encode(content))
        progress = self._connection.progress
        return progress.wait(progress.submit(operation, description))

    def take(self, slot: Any) -> None:
        """Starts to send a message that a program has posted; called by the progress thread."""
        number, step = slot.number, slot.step
        description = (
            f"exchange {number} with the center, posted by {self._name} after step {step},"
        )
        operation = self._exchange(slot, self._table.memory(slot))
        self._connection.progress.start(slot, operation, description, measured=True, call=None)

    def _exchange(self, slot: Any, memory: Memory) -> Operation:
        """Sends a message; its reply are the sums. Returns the header and the bytes sent."""
        size = sum(vector.nbytes for vector, _ in memory.pairs)
        text = "%s posted exchange %d with the center after step %d, %d bytes"
        logger.debug(text, self._name, slot.number, slot.step, size)
        content = yield from self._connection.request(
            frames.EXCHANGE,
            [vector for vector, _ in memory.pairs],
            contributes=slot.header[0] > 0,
            fingerprint=frames.fingerprint(self.rule_name, memory.specs),
        )
        frames.copy_content(content, [sums for _, sums in memory.pairs])
        return np.array(reply_header(memory.finite()), np.float32), size

    def log_completed(self) -> None:
        """Nothing is logged of exchanges that programs have collected."""

    def report_error(self, problem: str) -> None:
        """Reports an error of compiled code."""
        report_error(self._topology, self._abort, problem)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return abort_on_error(self._topology, self._abort)
