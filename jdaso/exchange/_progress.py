"""A thread that moves messages while training computes.

MPI makes progress only inside its own calls: a plain ``Iallreduce`` hides next to nothing, and a
thread that sits in a blocking call burns the core it should leave to training. So this thread
asks every posted operation whether it can go on, and sleeps in between: a millisecond, and while
nothing moves two, since every look takes time from the core that trains.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jdaso._base import JdasoError
from jdaso.exchange._farewell import Farewell
from jdaso.exchange._messages import Waiting, Waits

# Between two looks at what is in flight. A slow link's buffers last for the longest.
_POLL_SECONDS, _LONGEST_POLL_SECONDS, _SLOWER = 1e-3, 2e-3, 1.5
_ASK_SECONDS = 0.5  # for those that have ended
# Somebody who waits does not train: the core is free, and latency counts.
_POLL_SECONDS_WAITED_FOR = 5e-5


class Request:
    """An operation under way; done when it has returned or failed, after so many seconds."""

    def __init__(self, operation: Waits, what: str, deadline: float):
        self.what = what
        self.deadline = deadline
        self.waiting = Waiting(frozenset())
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.since = time.monotonic()
        self.seconds = 0.0
        self._operation = operation

    def step(self) -> None:
        """Moves the operation on as far as it can go now."""
        try:
            self.waiting = next(self._operation)
        except StopIteration as end:
            self.result = end.value
            self.seconds = time.monotonic() - self.since
            self.done.set()
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the operation with an error."""
        self.error = error
        self.done.set()


class Progress:
    """One thread that moves all operations of one exchange.

    Args:
        describe: rank -> text, names a rank and its host in errors.
        timeout: seconds after which an operation that has not ended is an error.
        farewell: tells who has ended, and is said at exit.
        abort: ends all processes; the last resort at exit.
    """

    def __init__(
        self,
        describe: Callable[[int], str],
        timeout: float,
        farewell: Farewell,
        abort: Callable[[], None],
    ):
        self._describe = describe
        self._timeout = timeout
        self._farewell = farewell
        self._abort = abort
        self._requests: list[Request] = []
        # What has failed may still be written to by MPI: it is kept, and its memory with it.
        self._failed: list[Request] = []
        self._changed = threading.Condition()
        self._closing = False
        self._waiters = 0
        self._thread = threading.Thread(target=self._run, name="jdaso-progress", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def submit(self, operation: Waits, what: str) -> Request:
        """Starts an operation; returns at once."""
        request = Request(operation, what, time.monotonic() + self._timeout)
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
            print(
                f"jdaso: exit with an exchange in flight that cannot end: {'; '.join(errors)}",
                file=sys.stderr,
                flush=True,
            )
            self._abort()
        self._farewell.say()

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
        while True:
            with self._changed:
                while not self._requests:
                    if self._closing:
                        return
                    self._changed.wait()
                requests = list(self._requests)
            if time.monotonic() > ask_again:
                gone, ask_again = self._farewell.gone(), time.monotonic() + _ASK_SECONDS
            for request in requests:
                request.step()
                self._check(request, gone)
            self._failed += [request for request in requests if request.error is not None]
            if any(request.done.is_set() for request in requests):
                with self._changed:
                    self._requests = [r for r in self._requests if not r.done.is_set()]
                continue
            moved = any(request.waiting.moved for request in requests)
            pause = _POLL_SECONDS if moved else min(_SLOWER * pause, _LONGEST_POLL_SECONDS)
            with self._changed:
                self._changed.wait(_POLL_SECONDS_WAITED_FOR if self._waiters else pause)

    def _check(self, request: Request, gone: frozenset[int]) -> None:
        """Fails a request whose partners have ended, or whose deadline has passed."""
        if request.done.is_set():
            return
        missing = request.waiting.ranks
        if ended := missing & gone:
            request.fail(
                JdasoError(
                    f"{request.what} cannot end: {self._names(ended)} ended without taking part. "
                    "All nodes must take the same number of steps."
                )
            )
        elif time.monotonic() > request.deadline:
            request.fail(
                JdasoError(
                    f"{request.what} did not end within {self._timeout:g} s: nothing came from "
                    f"{self._names(missing)}. Did it stop, fall behind, or skip a step? "
                    "mpi_exchange(..., timeout=) sets how long to wait."
                )
            )

    def _names(self, ranks: frozenset[int]) -> str:
        return ", ".join(self._describe(rank) for rank in sorted(ranks)) or "the other processes"
