"""The exchanges of one process over MPI: communicators, operations, and calls of the host.

:class:`Membership` has the communicators, :class:`MpiTransport` serves the slots over them, and
:class:`HostCollectives` are the calls that the program makes outside of exchanges.
"""

from __future__ import annotations

import logging
import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jdaso.cluster.ending import at_exit
from jdaso.cluster.local_devices import devices_are_busy
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.roll_call import Call
from jdaso.cluster.topology import Topology
from jdaso.core.consensus import caller
from jdaso.core.exchange import FINITE, HEADER_SIZE, OWN, UNCOUNTED, PostedExchange
from jdaso.core.log import logger
from jdaso.core.tree import KEEP_OUT, host_arrays, named_floats
from jdaso.core.types import JdasoError, PyTree
from jdaso.core.wire import describe_narrow_wires
from jdaso.exchange.host.layout import Layout, Memory, sender
from jdaso.exchange.host.slots import Table, exchange_name
from jdaso.exchange.transport import collectives
from jdaso.exchange.transport.handshake import (
    IN_VAIN,
    Abandoned,
    Watch,
    exit_barrier,
    handshake,
)
from jdaso.exchange.transport.progress import Operation, Progress, Request, completed, wait_for

# Operations that the processes post in the same order.
SERIES = ("exchanges", "consensus", "comparisons", "broadcasts", "flags", "exits")


class Membership:
    """The communicators of one exchange, and the counts of the operations that they carry.

    Creating them is collective over all processes. All processes must post the operations of one
    communicator in the same order. The order between kinds depends on timing, so each kind has its
    own communicator.
    """

    def __init__(self, topology: Topology, chunk_bytes: int, name: str = ""):
        self.topology, self.chunk_bytes, self.of_name = topology, chunk_bytes, of_name(name)
        self._roll_call = topology.heartbeat and topology.heartbeat.roll_call
        ranks = [process.rank for process in topology.processes]
        self._series = (
            {name: self._roll_call.new_series(ranks) for name in SERIES} if self._roll_call else {}
        )
        # One for each local index, which exchanges use in turn. If a node consists of several
        # processes, each has one local index, its local rank.
        self.by_index = [_communicators(topology) for _ in topology.devices]
        self.handshakes = topology.duplicate_comm()
        # A consensus must not receive messages of exchanges that are in flight. Inside a program
        # nothing orders it and a post, so it has handshakes of its own.
        self.consensus = _communicators(topology)
        self.consensus_handshakes = topology.duplicate_comm()
        self.comparisons = topology.duplicate_comm()
        # Each process broadcasts the shards of its local rank.
        self.broadcasts = topology.across_nodes()
        self.flags = topology.duplicate_comm()  # of ``any_true``
        self._failed = False  # whether an operation of any process has, at the end

    def free(self) -> None:
        """Frees all communicators; collective over all processes.

        After a failure messages may still arrive. Then the communicators stay until the end.
        """
        from mpi4py import MPI

        if self._failed or MPI.Is_finalized():
            return
        pairs = [comm for pair in [*self.by_index, self.consensus] for comm in pair if comm]
        others = self.comparisons, self.broadcasts, self.flags
        for comm in [self.handshakes, self.consensus_handshakes, *pairs, *others]:
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
            for name, series in self._series.items():
                if not (progress.abandons and name == "exchanges"):  # these are answered
                    self._roll_call.close(series)
        abandons = progress.abandons
        barrier = exit_barrier(self.handshakes, abandons, progress.has_failed())
        own = self.topology.describe(self.topology.rank)
        what = "abandoning" if abandons else "closing"
        name = f"the {what} of an exchange{self.of_name}, by {own},"
        request = progress.submit(barrier, name, call=call, last=True)
        self._failed = True  # unless the barrier says otherwise
        # While another thread waits, the main thread may post other operations.
        main = threading.main_thread()
        self._failed = request.wait(lambda: threading.current_thread() is not main)


def _communicators(topology: Topology) -> tuple[Comm, Comm | None]:
    """Of one process of each node, and of the processes of this node if there are several."""
    within_node = topology.within_node() if topology.joined else None
    return topology.across_nodes(), within_node


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
    "{} is not in flight in %s: the optimizer state was stepped twice, or is from before a restart "
    "or a restore, which forgets what was in flight. Save and restore with jdaso.checkpoint, or "
    "call jdaso.drain before saving. A running training looks at a checkpoint with "
    "checkpoints.restore(like, resume=False)."
)


def mpi_table(topology: Topology, name: str = "") -> Table:
    """The slots of an exchange over MPI, with the errors that they report."""
    own, exchange = topology.describe(topology.rank), "{}" + of_name(name)
    twice, unknown = (x.replace("{}", exchange) % own for x in (_POSTED_TWICE, _NOT_IN_FLIGHT))
    return Table(twice, unknown)


def of_name(name: str) -> str:
    """What messages add to the number of an exchange that has a name."""
    return f" of {name!r}" if name else ""


class MpiTransport:
    """Serves the slots of an exchange: sums what programs have posted, and saves what is in flight.

    Programs fill and read the slots without it. :meth:`take` runs on the progress thread.
    """

    def __init__(self, membership: Membership, progress: Progress):
        topology = membership.topology
        self._membership, self._progress = membership, progress
        self._of_name, self._table = membership.of_name, progress.table
        self._name = topology.describe(topology.rank)
        # World ranks of the processes with each local rank, in the order of nodes.
        places = np.array(topology.placements)
        by_node = np.lexsort((places[:, 1], places[:, 0]))
        self._members = by_node.reshape(-1, topology.processes_per_node).T
        self._last_of_queue: dict[int, Request] = {}
        self._spare: list[np.ndarray] = []  # memory in which terms of sums have arrived
        self._alone = 0  # exchanges since another process has abandoned them
        self._left_out = 0
        self._watch = Watch()
        self._total = math.inf  # steps of the schedule
        self._saved: set[int] = set()  # exchanges that a checkpoint may hold
        self._logged = 0.0  # when the last exchange ended that has been logged
        self.report, self.history = self._table.report, self._table.records
        progress.exchanges = self
        # Registered before the function that waits for programs, so it runs after that one.
        self._forget_exit = at_exit(self._warn_of_lost)

    def at_close(self) -> list[Callable[[], None]]:
        """What ends the transport, in this order."""
        return [self._progress.close, self._membership.free, self._forget]

    def abandon(self) -> None:
        """From now on exchanges in flight may be lost, because others may never post them."""
        if not self._progress.abandons:
            logger.warning(
                "%s abandons its exchanges%s, and waits until all nodes close them.",
                *(self._name, self._of_name),
            )
        self._progress.abandons = True

    def _forget(self) -> None:
        self._forget_exit()
        if not self._progress.abandons:
            self._warn_of_lost()
        self._table.clear()
        self._last_of_queue.clear()

    def begin_run(self, total: int | None, gradients: bool) -> None:
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
        number, step = slot.number, slot.step
        header = np.frombuffer(slot.header, np.float32).copy()
        memory = self._table.memory(slot)
        if header[0] <= 0:
            self._warn_left_out(number, memory, int(-header[0]))
        if number != UNCOUNTED and step >= self._total:
            logger.warning(_PAST_THE_END, self._name, self._total)
            self._total = math.inf
        # The exchanges of a queue share communicators and run in order.
        if number == UNCOUNTED:  # a consensus, which belongs to no step
            queue, series = UNCOUNTED, "consensus"
            posted = f"called by {self._name} as jdaso.consensus or jdaso.drift"
        else:
            queue, series = number % len(self._membership.by_index), "exchanges"
            posted = f"posted by {self._name} after step {step}"
        before = self._last_of_queue.get(queue)
        self._saved.discard(number)
        name, size = self._label(number), sum(vector.nbytes for vector, _ in memory.pairs)
        logger.debug("%s posted %s after step %d, %d bytes", self._name, name, step, size)
        self._last_of_queue[queue] = self._progress.start(
            slot,
            self._exchange(queue, number, step, header, memory, before, self._watch),
            f"{name}, {posted},",
            measured=number != UNCOUNTED,
            call=self._membership.call(series),
        )

    def _exchange(
        self,
        queue: int,
        number: int,
        step: int,
        header: np.ndarray,
        memory: Memory,
        before: Request | None,
        watch: Watch,
    ) -> Operation:
        """Sums a memory of a slot; returns the header and the bytes sent.

        Handshakes begin at once, because all processes must begin them in one order. The sums wait
        for ``before``, the last exchange on the same communicator: the messages of several
        fragments look alike, and messages of a failed exchange may still arrive.
        """
        membership, topology, layout = self._membership, self._membership.topology, memory.layout
        if number == UNCOUNTED:
            (nodes, within_node), handshakes = membership.consensus, membership.consensus_handshakes
        else:
            (nodes, within_node), handshakes = membership.by_index[queue], membership.handshakes
        name, first = self._label(number), self._members[0]
        content = watch.content(number, header, memory, topology.local_rank)
        try:
            total, records = yield from handshake(
                *(handshakes, name, layout.fingerprint, number, step, header, content),
                *(first, topology.describe),
            )
        except Abandoned as other:
            return self._abandoned(number, *other.args), 0
        watch.compare(number, records["content"][self._members], topology, layout)
        watch.check_contributions(number, records["header"][first, 0], layout)
        yield from completed(before)
        members = float(total[0])
        how = members, membership.chunk_bytes, self._spare
        if within_node is None:
            sent = yield from collectives.sum_staged(nodes, memory, *how)
            finite = memory.finite()  # the same on all nodes, as the sums are
        else:
            # Sums the shards that this process sends, and passes the sums on to the other holders.
            sent = 0
            for holders, group in memory.by_holders():
                root = sender(holders, number)
                if root == topology.local_rank:
                    sent += yield from collectives.sum_staged(nodes, group, *how)
                yield from collectives.pass_on(within_node, group, root, {*holders} - {root})
            # Other processes of the node have other shards.
            lost = not memory.finite()
            finite = not (yield from collectives.any_true(within_node, lost))
        watch.check_sums(number, finite, members, memory)
        total[FINITE], total[OWN] = finite, header[0] > 0
        return total, sent

    def _abandoned(self, number: int, rank: int) -> np.ndarray:
        """The header of an exchange that another process has abandoned: it brings nothing."""
        self._alone += 1
        text = (
            f"{self._membership.topology.describe(rank)} has abandoned the exchanges"
            f"{self._of_name}, and {exchange_name(number)} averages nothing. Leave the training "
            "here as well, and call exchange.close(abandon=True)."
        )
        if self._alone >= IN_VAIN:
            raise JdasoError(text)
        if self._alone == 1:
            logger.warning("%s", text)
        header = np.zeros(HEADER_SIZE, np.float32)
        header[FINITE] = 1
        return header

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
                name = self._label(record.number)
                logger.debug(text, self._name, name, record.step, *seconds)

    def _label(self, number: int) -> str:
        return exchange_name(number) + self._of_name

    def posted(self) -> dict[int, PostedExchange]:
        """Copies of the exchanges that are posted and not yet collected. The caller saves them."""
        self._table.await_posted()
        saved = {}
        for slot in self._table.in_flight():
            try:
                memory, header = self._table.memory(slot), np.array(slot.header, np.float32)
                layout = memory.layout
                leaves = layout.join(memory.leaves, slot.number)
                how = layout.block_bits, layout.relative
                saved[slot.number] = PostedExchange(slot.step, header, leaves, *how)
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
        self._progress.wait(self._progress.submit(wait_for(()), "the return to a checkpoint"))
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
                *(self._name, self._label(number), which, self._left_out - 1, advice),
            )


# Calls of ``any_node`` until its answer, which has arrived by then in most cases. One node may be
# this many steps ahead of another.
_ANSWER_AFTER = 4


# In place of a fingerprint.
_TRACED = -1
_DIFFERENT = (
    "in tx.init, the parameters of %s differ from those of %s, so the first exchanges average "
    "unrelated numbers: start all nodes with params = jdaso.broadcast(exchange, params) before "
    "tx.init."
)


def _fingerprint(params: PyTree) -> int:
    """A checksum of the floating-point leaves that this process holds."""
    checksum = 0
    for _, leaf in named_floats(params):
        if not (arrays := host_arrays(leaf)):
            return _TRACED
        for array in arrays:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            checksum = zlib.crc32(data, checksum)
    return checksum


class HostCollectives:
    """Broadcasts, comparisons and queries of all processes."""

    def __init__(self, membership: Membership, progress: Progress):
        self._membership, self._progress = membership, progress
        self._name = membership.topology.describe(membership.topology.rank)
        self._flags: deque[Request] = deque()

    def any_node(self, flag: bool) -> bool:
        """Whether any process passed True in the fourth call before this one, if there is one."""
        asked = collectives.any_true(self._membership.flags, flag)
        call = self._membership.call("flags")
        description = f"a flag{self._membership.of_name}, sent by {self._name},"
        self._flags.append(self._progress.submit(asked, description, call=call))
        if len(self._flags) <= _ANSWER_AFTER:
            return False
        return self._progress.wait(self._flags.popleft(), devices_are_busy)

    def broadcast(self, leaves: Sequence[np.ndarray], root: int) -> list[np.ndarray]:
        """The leaves of node ``root``.

        Each process receives the shards of its local rank.
        """

        def from_root() -> Operation:
            copies = [np.array(leaf, order="C") for leaf in leaves]
            yield from collectives.broadcast(self._membership.broadcasts, copies, root)
            return copies

        # No ``busy``: outside jit, the comparison before it has waited for the devices. Inside jit,
        # they are busy with this broadcast.
        return self._run(from_root(), "broadcasts", caller() or "a broadcast")

    def compare(self, outline: Sequence[str]) -> None:
        """Raises JdasoError, on every node, if the outlines of the nodes' trees differ."""

        def compare() -> Operation:
            pair = yield from collectives.different(self._membership.comparisons, outline)
            if pair is not None:
                ranks, describe = list(pair), self._membership.topology.describe
                collectives.check_alike(list(pair.values()), lambda index: describe(ranks[index]))

        what = f"the comparison of parameters in {caller() or 'tx.init'}"
        self._run(compare(), "comparisons", what, devices_are_busy)

    def warn_if_different(self, params: PyTree) -> None:
        """Logs which processes start with other parameters than those of the first node.

        Nothing is compared if one of them traces its parameters.
        """
        own, membership = np.array([_fingerprint(params)], np.int64), self._membership

        def compare() -> Operation:
            topology = membership.topology
            numbers = yield from collectives.gather(membership.comparisons, own)
            # Each process of a node may hold other shards.
            local = [place.local_rank for place in topology.placements]
            alike = [local.index(each) for each in local]
            differs = np.flatnonzero(numbers != numbers[alike])
            if topology.rank == 0 and differs.size and (numbers != _TRACED).all():
                one, other = alike[differs[0]], int(differs[0])
                logger.warning(_DIFFERENT, *map(topology.describe, (other, one)))

        what = "the comparison of parameters in tx.init"
        self._run(compare(), "comparisons", what, devices_are_busy)

    def _run(
        self,
        operation: Operation,
        series: str,
        what: str,
        busy: Callable[[], bool] | None = None,
    ) -> Any:
        description = f"{what}{self._membership.of_name}, called by {self._name},"
        call = self._membership.call(series)
        request = self._progress.submit(operation, description, call=call)
        return self._progress.wait(request, busy)
