"""An operation under way, and what became of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from jdaso._base import JdasoError
from jdaso.exchange._messages import Regrouped, Waiting, Waits
from jdaso.exchange._pace import Pace


def after(before: Request | None) -> Waits:
    """Waits until another operation has ended; raises its error, if it has failed."""
    while before is not None and not before.done.is_set():
        yield Waiting(before.waiting.ranks)
    if before is not None and before.error is not None:
        raise before.error


class Request:
    """An operation under way; done when it has returned or failed, after so many seconds."""

    def __init__(self, operation: Waits, what: str, regular: bool, pace: Pace):
        self.what = what
        self.regular = regular
        self.waiting = Waiting(frozenset())
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.since = time.monotonic()
        self.seconds = 0.0
        self.warn_at = self.since + pace.warning()
        self.deadline = self.since + pace.deadline()
        self.failed_at = 0.0
        self.taken = False
        self._operation = operation
        self._begun = False

    def step(self, move: Callable[[], Waiting] | None = None) -> None:
        """Moves the operation on as far as it can go now."""
        try:
            self.waiting = (move or self._look)()
        except StopIteration as end:
            self.result = end.value
            self.seconds = time.monotonic() - self.since
            self.done.set()
        except JdasoError as error:
            self.fail(error)
        except BaseException as error:  # MPI's own, which say neither who nor what
            told = JdasoError(f"{self.what} failed: {type(error).__name__}: {error}")
            told.__cause__ = error
            self.fail(told)

    def begin_anew(self) -> None:
        """Lets the operation begin anew without those that have died, with time as at first."""
        self.forgive(time.monotonic() - self.since)
        if self._begun:  # otherwise it knows nobody yet
            self.step(lambda: self._operation.throw(Regrouped()))

    def _look(self) -> Waiting:
        asked, self._begun = self.waiting.requests, True
        try:
            # One question to MPI for all of them; most looks end here.
            if asked and not asked[0].Testany(asked)[1]:
                return self.waiting._replace(moved=False)
        except Exception as error:  # of MPI, for the operation to make of it what it can
            return self._operation.throw(error)
        return next(self._operation)

    def forgive(self, seconds: float) -> None:
        """So long nobody could have moved it."""
        self.since += seconds
        self.warn_at += seconds
        self.deadline += seconds

    def fail(self, error: BaseException) -> None:
        """Ends the operation with an error."""
        self.error, self.failed_at = error, time.monotonic()
        self.done.set()
