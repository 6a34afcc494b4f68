"""A worker's side of a centre over MPI: what it has sent, and what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from jdaso._base import JdasoError, nothing_to_report
from jdaso._center import REPLY_HEADER
from jdaso.center import _protocol as protocol
from jdaso.center._line import Line
from jdaso.exchange._carrier import ending_all_devices
from jdaso.exchange._request import Request
from jdaso.exchange._reserved import Reserved
from jdaso.exchange._staging import Pool, Spec, Staging
from jdaso.topology import Topology


class _Flight(NamedTuple):
    request: Request
    staging: Staging


class Client:
    """Carries a worker's messages to the centre, and the replies back; see :class:`Carrier`.

    Args:
        topology: who the others are.
        line: to the server.
        end: ``(reason)``, ends this worker.
    """

    def __init__(self, topology: Topology, line: Line, end: Callable[[str], None]):
        self._topology = topology
        self._line = line
        self._end = end
        self._name = topology.describe(topology.rank)
        self._rule = ""
        self._lock = threading.Condition()
        self._pool = Pool()
        self.reserved = Reserved(self._lock)
        self._flights: dict[int, _Flight] = {}
        self._highest = -1
        self._asked_for: dict[int, int] = {}
        self._report = nothing_to_report()

    def begin(self, rule: str) -> None:
        """Says by which rule exchanges are meant."""
        self._rule = rule

    def start_anew(self) -> None:
        """Exchanges are counted from 0 again."""
        with self._lock:
            self._highest = -1

    def report(self) -> dict[str, Any]:
        """Exchanges collected, bytes sent for them, seconds in flight, seconds waited for."""
        return dict(self._report)

    def ask(self, kind: int, content: Any) -> np.ndarray:
        """The content of the server's answer to a question, which it waits for."""
        what = f"a question to the centre, asked by {self._name},"
        return self._line.wait(self._line.submit(kind, what, protocol.spoken(content)))

    def reserve(self, number: int, specs: Sequence[Spec]) -> Staging:
        """Host memory for a message that is about to be sent."""
        with self._lock:
            if number <= self._highest:
                raise JdasoError(
                    f"exchange {number} with the centre was posted twice in {self._name}: one "
                    "optimizer state was stepped twice (as optax.MultiSteps does), or two states "
                    "share this centre. To go back to an earlier state, call tx.init first."
                )
            self._highest = number
            # What has a higher number is of a state that was given up; a lower one, another device
            # of this node may not have taken yet.
            for abandoned in [n for n in self._flights if n >= number]:
                del self._flights[abandoned]
                self._asked_for.pop(abandoned, None)
            staging = self._pool.take(specs)
            self.reserved.put(number, staging)
        return staging

    def post(self, number: int, step: int, header: np.ndarray) -> None:
        """Sends what is in the reserved memory."""
        with self._lock:
            staging = self.reserved.take(number)
            request = self._line.submit(
                protocol.EXCHANGE,
                f"exchange {number} with the centre, posted by {self._name} after step {step},",
                [vector for vector, _ in staging.pairs],
                contributes=bool(header[0] > 0),
                fingerprint=protocol.fingerprint(self._rule, staging.specs),
            )
            self._report["bytes_sent"] += sum(vector.nbytes for vector, _ in staging.pairs)
            self._flights[number] = _Flight(request, staging)
            self._lock.notify_all()

    def collect(self, number: int, takers: int) -> tuple[Staging, np.ndarray]:
        """Waits for a reply; its memory, and the header."""
        with self._lock:
            flight = self.reserved.flight(number, takers, self._flights)
        if flight is None:
            raise JdasoError(
                f"exchange {number} with the centre is not in flight in {self._name}: the "
                "optimizer state is from before a restart, or was stepped twice. Call jdaso.drain "
                "before saving."
            )
        content, blocked = self._line.timed(flight.request)
        with self._lock:
            asked = self._asked_for.pop(number, 0) + 1
            if asked == 1:
                protocol.unfold(content, [sums for _, sums in flight.staging.pairs])
                self._report["exchanges"] += 1
                self._report["seconds_blocked"] += blocked
                self._report["seconds_in_flight"] += flight.request.seconds
            if asked < takers:
                self._asked_for[number] = asked
            else:
                self._flights.pop(number, None)
                self._pool.give_back(flight.staging, takers, spare=True)
        return flight.staging, np.array(REPLY_HEADER, np.float32)

    def ending_all_devices(self) -> AbstractContextManager[None]:
        """Ends this worker, and no other, on an error where it has several devices."""
        return ending_all_devices(self._topology, self._end)
