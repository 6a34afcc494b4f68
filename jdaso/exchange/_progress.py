"""A thread that moves messages while training computes.

MPI makes progress only inside its own calls: a plain ``Iallreduce`` hides next to nothing, and a
thread that sits in a blocking call burns the core it should leave to training. So this thread
asks every posted operation whether it can go on, and sleeps in between: every look takes time from
the core that trains, so on a slow network, where seldom something arrives, it looks less often.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from jdaso._at_exit import at_exit
from jdaso._base import JdasoError
from jdaso.exchange._messages import Waits
from jdaso.exchange._pace import Pace
from jdaso.exchange._request import Request
from jdaso.topology import Topology

# Between two looks at what is in flight: a part of the time since something last moved, within
# these limits. A slow link's buffers last for the longest; who serves others looks more often.
_POLL_SECONDS, _LONGEST_POLL_SECONDS, _LOOKS_A_MOVE = 5e-4, 10e-3, 4
_LONGEST_SERVING_SECONDS = 2e-3
_ASK_SECONDS = 0.5  # for those that have ended
# A process that was stopped for longer than that, or a machine that slept, was itself late.
_PAUSE_SECONDS = 5.0
# An error that nobody has taken for so long, nobody will: all are waiting for something else.
_UNTAKEN_SECONDS = 60.0
# Somebody who waits does not train: the core is free, and latency counts.
_POLL_SECONDS_WAITED_FOR = 5e-5


class Recovery(Protocol):
    """What becomes of operations when a process has died; see ``_survivors.py``."""

    def survives(self, error: BaseException) -> bool:
        """Whether an error of MPI's says that one has died, and the others go on."""

    def regroup(self) -> Topology:
        """Brings together those that are left; called by the thread, before all begins anew."""


class Ending(Protocol):
    """Who has ended, and how this process tells that it does; see ``_farewell.py``."""

    def gone(self) -> frozenset[int]:
        """The ranks that have ended, and from which nothing more can arrive."""

    def say(self) -> None:
        """Tells that this process ends, and waits until it may."""


class Progress:
    """One thread that moves all operations of one exchange.

    Args:
        topology: who the others are, and whether they live.
        timeout: seconds that an operation is given at least; then it is an error.
        farewell: tells who has ended, and is said at exit.
        end: ``(reason)``, called if something cannot end, at exit or where nobody waits for it.
        recovery: what becomes of operations when a process has died; None if they fail.
    """

    def __init__(
        self,
        topology: Topology,
        timeout: float,
        farewell: Ending,
        end: Callable[[str], None],
        recovery: Recovery | None = None,
    ):
        self._topology = topology
        self._recovery = recovery
        self._end = end
        self._farewell = farewell
        self._pace = Pace(timeout)
        self._requests: list[Request] = []
        # What has failed may still be written to by MPI: it is kept, and its memory with it.
        self._failed: list[Request] = []
        self._changed = threading.Condition()
        self._closing = False
        self._waiters = 0
        self._thread = threading.Thread(target=self._run, name="jdaso-progress", daemon=True)
        self._thread.start()
        at_exit(self.close)

    def submit(self, operation: Waits, what: str, regular: bool = False) -> Request:
        """Starts an operation, one of many that take as long or not; returns at once."""
        request = Request(operation, what, regular, self._pace)
        with self._changed:
            if self._closing:
                raise JdasoError(f"{what}: the interpreter is exiting, no exchange can start.")
            self._requests.append(request)
            self._changed.notify()
        return request

    def wait(self, request: Request) -> Any:
        """Waits for an operation, at most until its deadline; returns its result.

        Raises:
            JdasoError: if the operation failed or is late; names the ranks that are missing.
        """
        with self._changed:
            self._waiters += 1
            request.taken = True
            self._changed.notify()
        request.done.wait()
        with self._changed:
            self._waiters -= 1
        if request.error is not None:
            raise request.error
        return request.result

    def close(self) -> None:
        """Ends what is in flight, says farewell, and leaves MPI ready to be finalized."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            unfinished = list(self._requests)
            self._changed.notify()
        self._thread.join()
        errors = [str(request.error) for request in unfinished if request.error is not None]
        if errors:
            self._end(
                f"{self._topology.describe(self._topology.rank)} failed: exit with an exchange in "
                f"flight that cannot end: {'; '.join(errors)}"
            )
        self._say_farewell()

    def _say_farewell(self) -> None:
        """Anew when one dies meanwhile: others that are not so far may need this process."""
        while True:
            try:
                return self._farewell.say()
            except Exception as error:
                if self._recovery is None or not self._recovery.survives(error):
                    raise
                self._topology = self._recovery.regroup()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # Nobody may wait for a thread that is no more.
            with self._changed:
                self._closing = True
                for request in self._requests:
                    request.fail(error)

    def _loop(self) -> None:
        pause, gone, ask_again = _POLL_SECONDS, frozenset[int](), 0.0
        looked = last_moved = time.monotonic()
        while True:
            with self._changed:
                while not self._requests:
                    if self._closing:
                        return
                    self._changed.wait(_UNTAKEN_SECONDS if self._untaken() else None)
                    self._end_untaken()
                    looked = last_moved = time.monotonic()
                requests = list(self._requests)
            if (stopped := time.monotonic() - looked) > _PAUSE_SECONDS:
                for request in requests:
                    request.forgive(stopped)
            looked = time.monotonic()
            self._end_untaken()
            lost = False
            if time.monotonic() > ask_again:
                ask_again = time.monotonic() + _ASK_SECONDS
                try:
                    gone = self._farewell.gone()
                except Exception as error:
                    if self._recovery is None or not self._recovery.survives(error):
                        raise
                    lost = True
            for request in requests:
                request.step()
                self._check(request, gone, looked)
            if self._recovery and (lost or any(request.waiting.lost for request in requests)):
                self._topology, gone = self._recovery.regroup(), frozenset()
                looked = time.monotonic()
                for request in requests:
                    if not request.done.is_set():
                        request.begin_anew()
            self._failed += [request for request in requests if request.error is not None]
            ended = [request for request in requests if request.done.is_set()]
            for request in ended:
                if request.regular and request.error is None:
                    self._pace.note(request.seconds)
            if ended:
                with self._changed:
                    self._requests = [r for r in self._requests if not r.done.is_set()]
                continue
            quiet = (looked - last_moved) / _LOOKS_A_MOVE
            if any(request.waiting.moved for request in requests):
                pause, last_moved = max(quiet, _POLL_SECONDS), looked
            else:
                pause = max(quiet, pause)
            # Without messages of its own an operation waits for somebody's question.
            expecting = all(request.waiting.requests for request in requests)
            pause = min(pause, _LONGEST_POLL_SECONDS if expecting else _LONGEST_SERVING_SECONDS)
            with self._changed:
                self._changed.wait(_POLL_SECONDS_WAITED_FOR if self._waiters else pause)

    def _untaken(self) -> list[Request]:
        return [] if self._closing else [r for r in self._failed if not r.taken]

    def _end_untaken(self) -> None:
        """Ends the job for an error that would never come out."""
        for request in self._untaken():
            if time.monotonic() - request.failed_at > _UNTAKEN_SECONDS:
                request.taken = True
                who = self._topology.describe(self._topology.rank)
                self._end(f"{who} failed, while it waits for something else: {request.error}")

    def _check(self, request: Request, gone: frozenset[int], now: float) -> None:
        """Fails a request whose partners have ended, or whose deadline has passed."""
        if request.done.is_set():
            return
        states = self._topology.states
        missing, seconds = request.waiting.ranks, now - request.since
        if ended := missing & gone:
            names = ", ".join(map(self._topology.describe, sorted(ended)))
            request.fail(
                JdasoError(
                    f"{request.what} cannot end: {names} ended without taking part. All nodes must "
                    "take the same number of steps."
                )
            )
        elif now > request.deadline:
            request.fail(
                JdasoError(
                    f"{request.what} did not end within {request.deadline - request.since:g} s: "
                    f"nothing came from {states(missing)}. The argument timeout of mpi_exchange "
                    "and mpi_center sets how long to wait at least."
                )
            )
        elif now > request.warn_at:
            request.warn_at = now + seconds
            print(
                f"jdaso: {request.what} is late, for {seconds:.0f} s now: it waits for "
                f"{states(missing)}.",
                file=sys.stderr,
                flush=True,
            )
