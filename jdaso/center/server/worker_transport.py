"""A worker's side of a center over MPI: posts messages to the server, and collects its replies."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jdaso.center.server import frames
from jdaso.center.server.connection import Connection
from jdaso.center.types import ONLY_WITH_THE_SERVER, reply_header
from jdaso.cluster.topology import Topology
from jdaso.core.exchange import UNCOUNTED, empty_report
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.exchange_table import ExchangeTable
from jdaso.exchange.host.layout import Layout
from jdaso.exchange.host.transport_protocol import abort_on_error
from jdaso.exchange.transport.request import Request


class _Posted(NamedTuple):
    request: Request
    staging: StagingBuffers


class WorkerTransport:
    """Posts a worker's messages to the server, and returns its replies; see :class:`Transport`.

    ``abort(reason)`` ends this worker.
    """

    def __init__(self, topology: Topology, connection: Connection, abort: Callable[[str], None]):
        self._topology = topology
        self._connection = connection
        self._abort = abort
        self._name = topology.describe(topology.rank)
        self.rule_name = ""  # of the rule that the server must apply
        self._table: ExchangeTable[_Posted] = ExchangeTable()
        self.pending = self._table.pending
        self._report = empty_report()

    def restart_numbers(self) -> None:
        """Allows the numbers of exchanges to start again, once."""
        self._table.restart()

    def report(self) -> dict[str, Any]:
        """Exchanges collected, bytes sent for them, seconds in flight, and seconds waited."""
        return dict(self._report)

    def ask(self, kind: int, content: Any) -> np.ndarray:
        """Sends a request other than an exchange, and waits for the content of its reply."""
        description = f"a request to the center, sent by {self._name},"
        return self._connection.wait(
            self._connection.submit(kind, description, frames.encode(content))
        )

    def reserve(self, number: int, layout: Layout) -> StagingBuffers:
        if number == UNCOUNTED:
            raise ValueError(ONLY_WITH_THE_SERVER)
        posted_twice = (
            f"exchange {number} with the center was posted twice in {self._name}: one optimizer "
            "state was stepped twice (as optax.MultiSteps does), or two states share this center. "
            "To return to an earlier state, call tx.init first."
        )
        return self._table.reserve(number, layout, posted_twice)

    def post(self, number: int, step: int, header: np.ndarray) -> None:
        with self._table.lock:
            if (staging := self.pending.filled(number)) is None:
                return
            request = self._connection.submit(
                frames.EXCHANGE,
                f"exchange {number} with the center, posted by {self._name} after step {step},",
                [vector for vector, _ in staging.pairs],
                contributes=bool(header[0] > 0),
                fingerprint=frames.fingerprint(self.rule_name, staging.specs),
            )
            size = sum(vector.nbytes for vector, _ in staging.pairs)
            self._report["bytes_sent"] += size
            self._table.post(number, _Posted(request, staging))
        text = "%s posted exchange %d with the center after step %d, %d bytes"
        logger.debug(text, self._name, number, step, size)

    def collect(self, number: int, readers: int) -> tuple[StagingBuffers, np.ndarray]:
        """The staging buffers, which hold the reply as sums, and the header.

        The reply is forgotten when ``readers`` devices have collected it.
        """
        if (posted := self._table.find(number, readers)) is None:
            raise JdasoError(
                f"exchange {number} with the center is not in flight in {self._name}: the "
                "optimizer state is from before a restart, or was stepped twice. Call jdaso.drain "
                "before saving."
            )
        since = time.monotonic()
        content = self._connection.wait(posted.request)
        seconds = time.monotonic() - since
        with self._table.lock:
            first, last = self._table.collect(number, readers)
            if first:
                frames.copy_content(content, [sums for _, sums in posted.staging.pairs])
                self._report["exchanges"] += 1
                self._report["seconds_blocked"] += seconds
                self._report["seconds_in_flight"] += posted.request.seconds
            if last:
                self._table.pool.release(posted.staging, readers, reuse=True)
        if first:
            text = "%s completed exchange %d with the center; reply after %.6f s, blocked %.6f s"
            logger.debug(text, self._name, number, posted.request.seconds, seconds)
        return posted.staging, np.array(reply_header(posted.staging.finite()), np.float32)

    def abort_on_error(self) -> AbstractContextManager[None]:
        return abort_on_error(self._topology, self._abort)
