"""Posts and collects the exchanges of one process."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jdaso.cluster.ending import at_exit
from jdaso.core.exchange import UNCOUNTED, ExchangeRecord, PostedExchange
from jdaso.core.log import logger
from jdaso.core.tree import KEEP_OUT
from jdaso.core.types import JdasoError
from jdaso.core.wire import describe_narrow_wires
from jdaso.exchange.host.buffers import BufferPool, StagingBuffers
from jdaso.exchange.host.exchange_table import ExchangeTable
from jdaso.exchange.host.layout import Layout
from jdaso.exchange.host.transport_protocol import abort_on_error
from jdaso.exchange.transport.handshake import exchange_name
from jdaso.exchange.transport.membership import Membership
from jdaso.exchange.transport.progress import Progress
from jdaso.exchange.transport.request import Request
from jdaso.exchange.transport.statistics import Statistics
from jdaso.exchange.transport.watch import Watch

_PAST_THE_END = (
    "%s has taken the %d steps of its schedule. Every further step blocks: pass the steps of the "
    "whole run as total= to jdaso.cycling."
)


_LOST = (
    "%s still in flight at the end, posted after step %d, and will never be merged: call "
    "jdaso.drain after the last step. If the training is to continue later, save it with "
    "jdaso.checkpoint.Checkpoints, which saves what is in flight, or call jdaso.drain before you "
    "save it by other means."
)


class _Posted(NamedTuple):
    request: Request
    staging: StagingBuffers
    step: int
    header: np.ndarray


class MpiTransport:
    """Posts exchanges from staging buffers, and returns their sums; see :class:`Transport`."""

    def __init__(self, membership: Membership, progress: Progress):
        self._membership, self._progress = membership, progress
        self._name = membership.topology.describe(membership.topology.rank)
        self._table: ExchangeTable[_Posted] = ExchangeTable()
        self.pending = self._table.pending
        self._last_of_queue: dict[int, Request] = {}
        self._left_out = 0
        self._watch = Watch()
        self._total = math.inf  # steps of the schedule
        self._saved: set[int] = set()  # exchanges that a checkpoint may hold
        self.statistics = Statistics()
        # Registered before the function that waits for programs, so it runs after that one.
        self._forget_exit = at_exit(self._warn_of_lost)

    def forget(self) -> None:
        self._forget_exit()
        self._warn_of_lost()
        self._table.clear()
        self._last_of_queue.clear()
        self._table.pool = BufferPool()

    def abort_on_error(self) -> AbstractContextManager[None]:
        topology = self._membership.topology
        return abort_on_error(topology, topology.deaths.abort)

    def restart(self, total: int | None = None, gradients: bool = False) -> None:
        """Allows the numbers of exchanges to start again, once, for a run of ``total`` steps."""
        self._table.restart()
        self._watch = Watch(gradients)
        self._total = math.inf if total is None else total

    def reserve(self, number: int, layout: Layout) -> StagingBuffers:
        posted_twice = (
            f"{exchange_name(number)} was posted twice in {self._name}: one optimizer state was "
            "stepped twice (as optax.MultiSteps does: accumulate gradients in the training step), "
            "two states share this exchange, or tx.update ran once per device. Step each state "
            "once, make an mpi_exchange for each, and call tx.update outside shard_map, or inside "
            "one over all devices. To return to an earlier state, call tx.init first."
        )
        return self._table.reserve(number, layout, posted_twice)

    def post(self, number: int, step: int, header: np.ndarray) -> None:
        with self._table.lock:
            staging, header = self.pending.filled(number), np.array(header)
            if staging is None:
                return
            if header[0] <= 0:
                self._warn_left_out(number, staging, int(-header[0]))
            if number != UNCOUNTED and step >= self._total:
                logger.warning(_PAST_THE_END, self._name, self._total)
                self._total = math.inf
            communicators = self._membership.exchanges
            queue = communicators.queue(number)
            before = self._last_of_queue.get(queue)
            request = self._progress.submit(
                communicators.exchange(number, step, header, staging, before, self._watch),
                _description(number, step, self._name),
                measured=number != UNCOUNTED,
                call=self._membership.call("exchanges"),
            )
            self._last_of_queue[queue] = request
            self._table.post(number, _Posted(request, staging, step, header))
            self._saved.discard(number)
        name, size = exchange_name(number), sum(vector.nbytes for vector, _ in staging.pairs)
        logger.debug("%s posted %s after step %d, %d bytes", self._name, name, step, size)

    def collect(self, number: int, readers: int) -> tuple[StagingBuffers, np.ndarray]:
        """Waits for the staging buffer and the summed header of an exchange.

        The exchange is forgotten when ``readers`` devices have collected it. The buffer keeps the
        sums until its record says that each of them has copied the sums.
        """
        if (posted := self._table.find(number, readers)) is None:
            raise JdasoError(
                f"{exchange_name(number)} is not in flight in {self._name}: the optimizer state is "
                "from before a restart, or was stepped twice. Save and restore with "
                "jdaso.checkpoint, or call jdaso.drain before saving."
            )
        since = time.monotonic()
        header, sent = self._progress.wait(posted.request)
        until = time.monotonic()
        with self._table.lock:
            first, last = self._table.collect(number, readers)
            if first and number != UNCOUNTED:
                began, never = posted.request.started_at, (0.0, 0.0)  # copies are timed later
                transfer = (began, began + posted.request.seconds)
                waited = (since, until)
                record = ExchangeRecord(number, posted.step, sent, never, transfer, waited, never)
                self.statistics.note(record, posted.staging.record)
            if last:
                self._table.pool.release(posted.staging, readers, reuse=number != UNCOUNTED)
        if first:
            name, seconds = exchange_name(number), posted.request.seconds
            text = "%s completed %s posted after step %d; transfer %.6f s, training blocked %.6f s"
            logger.debug(text, self._name, name, posted.step, seconds, until - since)
        return posted.staging, header

    def posted(self) -> dict[int, PostedExchange]:
        """Copies of the exchanges that are posted and not yet collected. The caller saves them."""
        with self._table.lock:
            self.pending.wait_until_posted()
            posted = sorted(self._table.posted.items())
            saved = {number: _saved(number, each) for number, each in posted if number != UNCOUNTED}
            self._saved = set(saved)
            return saved

    def _warn_of_lost(self) -> None:
        if self._membership.topology.rank == 0:  # all have the same in flight
            with self._table.lock:
                _warn_of_lost(self._table.posted, self._saved | {UNCOUNTED})

    def post_again(self, saved: dict[int, tuple[Layout, PostedExchange]]) -> None:
        """Waits for all posted exchanges, forgets them, and posts the saved ones."""
        with self._table.lock:
            self.pending.wait_until_posted()
            requests = [posted.request for posted in self._table.posted.values()]
        for request in requests:
            self._progress.wait(request)
        self._table.clear()
        for number, (layout, exchange) in sorted(saved.items()):
            stagings = [self.reserve(number, layout) for _ in range(layout.senders)]
            stagings[0].fill(layout.cut(exchange.leaves))
            for _ in stagings:
                self.post(number, exchange.step, exchange.header)
        self._saved = set(saved)

    def _warn_left_out(self, number: int, staging: StagingBuffers, lost: int) -> None:
        """Warns at the first, second, fourth, eighth ... time. ``lost`` is as in the header."""
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:
            which, advice = "gradients of a step since the last merge were not finite", ""
            if lost:
                narrow = describe_narrow_wires([spec.dtype for spec in staging.specs])
                which = f"{staging.layout.name(lost - 1)} is not finite{narrow}"
                advice = f" {KEEP_OUT}"
            logger.warning(
                "%s is left out of %s, because %s. It was left out %d times before. If this "
                "continues, the optimizer's moments may not be finite either (jdaso.chain keeps "
                "them finite), or the learning rate is too high.%s",
                *(self._name, exchange_name(number), which, self._left_out - 1, advice),
            )


def _warn_of_lost(in_flight: Mapping[int, _Posted], known: set[int]) -> None:
    """Warns if exchanges are in flight at the end that nobody has merged or saved."""
    if lost := [posted.step for number, posted in in_flight.items() if number not in known]:
        what = "1 exchange is" if len(lost) == 1 else f"{len(lost)} exchanges are"
        logger.warning(_LOST, what, max(lost))


def _saved(number: int, posted: _Posted) -> PostedExchange:
    layout = posted.staging.layout
    leaves: list[Any] = layout.join(posted.staging.leaves, number)
    return PostedExchange(posted.step, posted.header, leaves, layout.block_bits, layout.relative)


def _description(number: int, step: int, name: str) -> str:
    """The subject of messages about an exchange, or a consensus, which belongs to no step."""
    if number == UNCOUNTED:
        return f"a consensus, called by {name} as jdaso.consensus or jdaso.drift,"
    return f"{exchange_name(number)}, posted by {name} after step {step},"
