"""Posts and collects the exchanges of one process."""

import logging
import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from jdaso.cluster.abort import at_exit
from jdaso.cluster.topology import Topology
from jdaso.core.exchange import UNCOUNTED, PostedExchange
from jdaso.core.log import logger
from jdaso.core.tree import KEEP_OUT
from jdaso.core.wire import describe_narrow_wires
from jdaso.exchange.host.layout import Layout, Memory
from jdaso.exchange.host.program import abort_on_error, report_error
from jdaso.exchange.host.slots import PlainTable, Table
from jdaso.exchange.transport.handshake import exchange_name
from jdaso.exchange.transport.membership import Membership
from jdaso.exchange.transport.operation import Operation
from jdaso.exchange.transport.progress import Progress
from jdaso.exchange.transport.request import Request
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


_POSTED_TWICE = (
    "{} was posted twice in %s: one optimizer state was stepped twice (as optax.MultiSteps does: "
    "accumulate gradients in the training step), two states share this exchange, or tx.update ran "
    "once per device. Step each state once, make an mpi_exchange for each, and call tx.update "
    "outside shard_map, or inside one over all devices. To return to an earlier state, call "
    "tx.init first."
)
_NOT_IN_FLIGHT = (
    "{} is not in flight in %s: the optimizer state is from before a restart, or was stepped "
    "twice. Save and restore with jdaso.checkpoint, or call jdaso.drain before saving."
)


def mpi_table(topology: Topology, native: bool) -> Table | PlainTable:
    """The slots of an exchange over MPI, with the errors that they report."""
    name = topology.describe(topology.rank)
    return (Table if native else PlainTable)(_POSTED_TWICE % name, _NOT_IN_FLIGHT % name)


class MpiTransport:
    """Serves the slots of an exchange: sums what programs have posted, and saves what is in flight.

    Programs fill and read the slots without it. :meth:`take` runs on the progress thread.
    """

    def __init__(self, membership: Membership, progress: Progress):
        self._membership, self._progress = membership, progress
        self._table = progress.table
        self._name = membership.topology.describe(membership.topology.rank)
        self._last_of_queue: dict[int, Request] = {}
        self._left_out = 0
        self._watch = Watch()
        self._total = math.inf  # steps of the schedule
        self._saved: set[int] = set()  # exchanges that a checkpoint may hold
        self._logged = 0.0  # when the last exchange ended that has been logged
        self.report, self.history = self._table.report, self._table.records
        progress.exchanges = self
        # Registered before the function that waits for programs, so it runs after that one.
        self._forget_exit = at_exit(self._warn_of_lost)

    def forget(self) -> None:
        self._forget_exit()
        self._warn_of_lost()
        self._table.clear()
        self._last_of_queue.clear()

    def abort_on_error(self) -> AbstractContextManager[None]:
        topology = self._membership.topology
        return abort_on_error(topology, topology.abort)

    def report_error(self, problem: str) -> None:
        """Reports an error of compiled code."""
        topology = self._membership.topology
        report_error(topology, topology.abort, problem)

    def restart(self, total: int | None = None, gradients: bool = False) -> None:
        """Allows the numbers of exchanges to start again, once, for a run of ``total`` steps.

        What programs have posted before belongs to the run before, so the thread has to take that
        first. The caller has waited for these programs.
        """

        def begin() -> Operation:
            yield from ()
            self._table.restart()
            self._watch = Watch(gradients)
            self._total = math.inf if total is None else total

        self._progress.wait(self._progress.submit(begin(), "the start of a run"))

    def take(self, slot: Any) -> None:
        """Starts the exchange of a slot that is filled."""
        number, step, header = slot.number, slot.step, np.array(slot.header, np.float32)
        memory = self._table.memory(slot)
        if header[0] <= 0:
            self._warn_left_out(number, memory, int(-header[0]))
        if number != UNCOUNTED and step >= self._total:
            logger.warning(_PAST_THE_END, self._name, self._total)
            self._total = math.inf
        communicators = self._membership.exchanges
        queue = communicators.queue(number)
        before = self._last_of_queue.get(queue)
        self._saved.discard(number)
        name, size = exchange_name(number), sum(vector.nbytes for vector, _ in memory.pairs)
        logger.debug("%s posted %s after step %d, %d bytes", self._name, name, step, size)
        self._last_of_queue[queue] = self._progress.start(
            slot,
            communicators.exchange(number, step, header, memory, before, self._watch),
            _description(number, step, self._name),
            measured=number != UNCOUNTED,
            call=self._membership.call("exchanges"),
        )

    def log_completed(self) -> None:
        """Logs the exchanges that programs have collected, with JDASO_DEBUG."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        for record in self._table.records():
            if record.wait[1] > self._logged:
                self._logged = record.wait[1]
                seconds = (end - start for start, end in (record.transfer, record.wait))
                text = (
                    "%s completed %s posted after step %d; transfer %.6f s, training blocked %.6f s"
                )
                name = exchange_name(record.number)
                logger.debug(text, self._name, name, record.step, *seconds)

    def posted(self) -> dict[int, PostedExchange]:
        """Copies of the exchanges that are posted and not yet collected. The caller saves them."""
        self._table.await_posted()
        saved = {}
        for slot in self._table.in_flight():
            try:
                saved[slot.number] = _saved(slot, self._table.memory(slot))
            finally:
                self._table.release(slot)
        self._saved = set(saved)
        return saved

    def _warn_of_lost(self) -> None:
        """Warns if exchanges are in flight at the end that nobody has merged or saved."""
        slots = self._table.in_flight()
        lost = [slot.step for slot in slots if slot.number not in self._saved]
        for slot in slots:
            self._table.release(slot)
        if lost and self._membership.topology.rank == 0:  # all have the same in flight
            what = "1 exchange is" if len(lost) == 1 else f"{len(lost)} exchanges are"
            logger.warning(_LOST, what, max(lost))

    def post_again(self, saved: dict[int, tuple[Layout, PostedExchange]]) -> None:
        """Waits for all posted exchanges, forgets them, and posts the saved ones."""
        table = self._table
        table.await_posted()
        table.await_done()
        table.clear()
        for number, (layout, exchange) in sorted(saved.items()):
            index = table.register(layout)
            sent = number, exchange.step, exchange.header, index
            slots = [table.begin_post(*sent) for _ in range(layout.senders)]
            table.memory(slots[0]).fill(layout.cut(exchange.leaves))
            for slot in slots:
                table.end_post(slot)
        self._progress.wait(self._progress.submit(_nothing(), "the return to a checkpoint"))
        self._saved = set(saved)

    def _warn_left_out(self, number: int, memory: Memory, lost: int) -> None:
        """Warns at the first, second, fourth, eighth ... time. ``lost`` is as in the header."""
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:
            which, advice = "gradients of a step since the last merge were not finite", ""
            if lost:
                narrow = describe_narrow_wires([spec.dtype for spec in memory.specs])
                which = f"{memory.layout.name(lost - 1)} is not finite{narrow}"
                advice = f" {KEEP_OUT}"
            logger.warning(
                "%s is left out of %s, because %s. It was left out %d times before. If this "
                "continues, the optimizer's moments may not be finite either (jdaso.chain keeps "
                "them finite), or the learning rate is too high.%s",
                *(self._name, exchange_name(number), which, self._left_out - 1, advice),
            )


def _saved(slot: Any, memory: Memory) -> PostedExchange:
    layout = memory.layout
    leaves: list[Any] = layout.join(memory.leaves, slot.number)
    header = np.array(slot.header, np.float32)
    return PostedExchange(slot.step, header, leaves, layout.block_bits, layout.relative)


def _nothing() -> Operation:
    yield from ()


def _description(number: int, step: int, name: str) -> str:
    """The subject of messages about an exchange, or a consensus, which belongs to no step."""
    if number == UNCOUNTED:
        return f"a consensus, called by {name} as jdaso.consensus or jdaso.drift,"
    return f"{exchange_name(number)}, posted by {name} after step {step},"
