"""The host's side of an MPI exchange: memory, and what is in flight."""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jdaso._base import UNCOUNTED, Flown, JdasoError, Posted
from jdaso.exchange import _operations as operations
from jdaso.exchange._carrier import ending_all_devices
from jdaso.exchange._channels import Channels, Strategy
from jdaso.exchange._farewell import Farewell
from jdaso.exchange._fault_tolerance import is_loss
from jdaso.exchange._history import History
from jdaso.exchange._progress import Progress
from jdaso.exchange._request import Request, after
from jdaso.exchange._reserved import Reserved
from jdaso.exchange._staging import Pool, Spec, Staging
from jdaso.exchange._survivors import Agreements, regroup
from jdaso.topology import Topology

# Calls of ``anyone`` until its answer: as many steps may one node be ahead of another.
_ANSWER_AFTER = 4


class Flight(NamedTuple):
    """An exchange that was posted: its request, its memory, and what went with it."""

    request: Request
    staging: Staging
    step: int
    header: np.ndarray


class Courier:
    """Carries exchanges between this process and the others.

    Args:
        topology: who the others are.
        strategy: how exchanges cross.
        timeout: seconds after which an exchange that has not ended is an error.
        shrinks: whether those that are left go on when a process has died.
    """

    def __init__(
        self, topology: Topology, strategy: Strategy, timeout: float, shrinks: bool = False
    ):
        self._strategy, self._timeout = strategy, timeout
        self._agreements = Agreements() if shrinks else None
        self._name = topology.describe(topology.rank)
        self._begun_with = topology
        self._connect(topology)
        self._asked: deque[Request] = deque()
        self._farewell = Farewell(topology.comm.Dup(), topology.states)
        recovery = self if shrinks else None
        self._progress = Progress(topology, timeout, self._farewell, topology.end_all, recovery)
        self._lock = threading.Condition()
        self._flights: dict[int, Flight] = {}
        self._highest = UNCOUNTED
        self.reserved = Reserved(self._lock)
        self._asked_for: dict[int, int] = {}
        self._last: dict[int, Request] = {}
        self._pool = Pool()
        self._left_out = 0
        self.history = History()

    def _connect(self, topology: Topology) -> None:
        self._topology = topology
        self._channels = Channels(topology, self._strategy)
        # For broadcast and comparison, which must not meet what is in flight.
        self._world = topology.comm.Dup()
        self._questions = topology.comm.Dup()

    def topology(self) -> Topology | None:
        """The processes that there are now, the same for all; None where they cannot change."""

        def here() -> operations.Waits:
            yield from ()
            return self._topology

        return self._run(here, "a question who is left") if self._agreements else None

    def survives(self, error: BaseException) -> bool:
        """Whether an error of MPI's says that one has died, and the others go on."""
        return self._agreements is not None and is_loss(error)

    def regroup(self) -> Topology:
        """Brings together those that are left, over new communicators."""
        before, agreements = self._topology, self._agreements
        assert agreements is not None

        def connect(topology: Topology) -> None:
            self._connect(topology)
            self._farewell.join(topology.comm.Dup(), topology.states)
            agreements.share(topology.comm)

        used = [*self._channels.communicators(), self._world, self._questions, self._farewell.comm]
        regroup(before, used, connect, self._timeout)
        return self._topology

    def ending_all_devices(self) -> AbstractContextManager[None]:
        """Ends the job on an error where a node has several devices."""
        return ending_all_devices(self._topology, self._topology.end_all)

    def reserve(self, number: int, specs: Sequence[Spec]) -> Staging:
        """Host memory for an exchange that is about to be posted; the leaves go into it."""
        with self._lock:
            under_way = number in self._flights or number in self.reserved
            if under_way or UNCOUNTED < number <= self._highest:
                raise JdasoError(
                    f"{_called(number)} was posted twice in {self._name}: one optimizer state "
                    "was stepped twice (as optax.MultiSteps does: accumulate gradients in the "
                    "training step), two states share this exchange, or tx.update ran once per "
                    "device. Step each state once, make an mpi_exchange for each, and call "
                    "tx.update outside shard_map, or inside one over the axis 'local'. To go back "
                    "to an earlier state, call tx.init first."
                )
            if number != UNCOUNTED:
                # What has a higher number belongs to a state that was started anew.
                for abandoned in [n for n in self._flights if n > number]:
                    del self._flights[abandoned]
                    self._asked_for.pop(abandoned, None)
            self._highest = max(self._highest, number)
            staging = Staging(specs) if number == UNCOUNTED else self._pool.take(specs)
            self.reserved.put(number, staging)
            return staging

    def post(self, number: int, step: int, header: np.ndarray) -> None:
        """Lets what is in the reserved memory fly."""
        with self._lock:
            staging, header = self.reserved.take(number), np.array(header)
            if header[0] == 0:
                self._say_left_out(number)
            line, attempts = self._channels.line(number), itertools.count()
            before = self._last.get(line)

            def exchange() -> operations.Waits:
                if next(attempts):
                    staging.move()
                return self._channels.exchange(number, step, header, staging, before)

            request = self._progress.submit(
                self._lasting(exchange, lambda: self._channels.meeting(number), f"line {line}"),
                f"{_called(number)}, posted by {self._name} after step {step},",
                regular=number != UNCOUNTED,
            )
            self._last[line] = request
            self._flights[number] = Flight(request, staging, step, header)
            self._lock.notify_all()

    def _say_left_out(self, number: int) -> None:
        """Seldom, if it goes on: at the first time, the second, the fourth, the eighth ..."""
        self._left_out += 1
        if self._left_out & (self._left_out - 1) == 0:
            print(
                f"jdaso: {self._name} is left out of {_called(number)}, and was of "
                f"{self._left_out - 1} before: its numbers are not finite. If that goes on, its "
                "optimizer's memory may not be, either (jdaso.chain keeps it so), or the learning "
                "rate is too high.",
                file=sys.stderr,
                flush=True,
            )

    def collect(self, number: int, takers: int) -> tuple[Staging, np.ndarray]:
        """Waits for an exchange; forgets it when ``takers`` devices have asked for it.

        Returns:
            The memory in which the sums are, until its record says that each taker has copied
            them, and the summed header.
        """
        with self._lock:
            flight = self.reserved.flight(number, takers, self._flights)
        if flight is None:
            raise JdasoError(
                f"{_called(number)} is not in flight in {self._name}: the optimizer state is "
                "from before a restart, or was stepped twice. Save and restore with "
                "jdaso.checkpoint, or call jdaso.drain before saving."
            )
        since = time.monotonic()
        header, sent = self._progress.wait(flight.request)
        until = time.monotonic()
        with self._lock:
            asked = self._asked_for.pop(number, 0) + 1
            if asked == 1 and number != UNCOUNTED:
                flown = Flown(
                    number,
                    flight.step,
                    sent,
                    fill=(0.0, 0.0),
                    flight=(flight.request.since, flight.request.since + flight.request.seconds),
                    wait=(since, until),
                    take=(0.0, 0.0),
                )
                self.history.note(flown, flight.staging.record)
            if asked < takers:
                self._asked_for[number] = asked
            else:
                del self._flights[number]
                self._pool.give_back(flight.staging, takers, spare=number != UNCOUNTED)
        return flight.staging, header

    def posted(self) -> dict[int, Posted]:
        """Copies of what was posted and not yet collected."""
        with self._lock:
            self.reserved.wait()
            return {
                number: Posted(
                    flight.step, flight.header, [leaf.copy() for leaf in flight.staging.leaves]
                )
                for number, flight in sorted(self._flights.items())
                if number != UNCOUNTED
            }

    def post_again(self, posted: dict[int, Posted]) -> None:
        """Forgets what is in flight, once it has landed, and lets what was saved fly."""
        with self._lock:
            self.reserved.wait()
            flights = list(self._flights.values())
        for flight in flights:
            self._progress.wait(flight.request)
        with self._lock:
            self._flights.clear()
            self._asked_for.clear()
            self._highest = UNCOUNTED
        for number, (step, header, leaves) in sorted(posted.items()):
            specs = [Spec(leaf.shape, leaf.dtype) for leaf in leaves]
            self.reserve(number, specs).put(leaves)
            self.post(number, step, header)

    def anyone(self, flag: bool) -> bool:
        """Whether any process said True some calls ago; seldom waits, so long it has had."""
        before = self._asked[-1] if self._asked and self._agreements else None

        def ask() -> operations.Waits:
            yield from after(before)  # as they agree one after the other
            return (yield from operations.anyone(self._questions, flag))

        asked = self._lasting(ask, lambda: self._questions, "questions")
        request = self._progress.submit(asked, f"a question to all, asked by {self._name},")
        self._asked.append(request)
        return len(self._asked) > _ANSWER_AFTER and self._progress.wait(self._asked.popleft())

    def broadcast(self, leaves: Sequence[np.ndarray], root: int) -> list[np.ndarray]:
        """The leaves of node ``root``."""

        def from_root() -> operations.Waits:
            copies = [np.array(leaf, order="C") for leaf in leaves]
            ranks = {process.rank: r for r, process in enumerate(self._topology.processes)}
            begun_with = self._begun_with
            who = next(r for r, place in enumerate(begun_with.places) if place.node == root)
            first = ranks.get(begun_with.processes[who].rank)
            if first is None:
                raise JdasoError(f"broadcast: its root, {begun_with.describe(who)}, has died.")
            yield from operations.broadcast(self._world, copies, first)
            return copies

        copies: list[np.ndarray] = self._run(from_root, "a broadcast")
        return copies

    def compare(self, outline: Sequence[str]) -> None:
        """Raises, on every node, if the nodes' trees are not alike; numbers may start anew."""
        self._highest = UNCOUNTED
        digest = hashlib.sha256("\n".join(outline).encode()).digest()
        self._run(
            lambda: operations.compare(self._world, outline, digest, self._topology.describe),
            "the comparison of parameters",
        )

    def _run(self, make: Callable[[], operations.Waits], what: str) -> Any:
        operation = self._lasting(make, lambda: self._world, "all")
        request = self._progress.submit(operation, f"{what}, called by {self._name},")
        return self._progress.wait(request)

    def _lasting(
        self, make: Callable[[], operations.Waits], comm: Callable[[], Any], line: str
    ) -> operations.Waits:
        """An operation, which a death ends, or not; see ``Agreements``."""
        return make() if self._agreements is None else self._agreements.lasting(make, comm, line)


def _called(number: int) -> str:
    return "a consensus" if number == UNCOUNTED else f"exchange {number}"
