"""A submitted operation with its deadline and its result."""

import threading
import time
from collections.abc import Callable
from typing import Any

from jdaso.cluster.roll_call import Call
from jdaso.core.types import JdasoError
from jdaso.exchange.transport.deadlines import Deadlines
from jdaso.exchange.transport.operation import Operation, WaitState

_BUSY_SECONDS = 0.5  # between two looks at whether a process is busy


class Request:
    """A submitted operation; ``done`` is set when it has returned or failed.

    The ``description`` is the subject of error messages, such as ``"exchange 3, posted by rank
    0,"``. If ``measured``, the operation's duration sets the deadlines of later ones. ``call`` says
    which operation of all processes it is, if it is one.
    """

    def __init__(
        self,
        operation: Operation,
        description: str,
        measured: bool,
        deadlines: Deadlines,
        call: Call | None = None,
    ):
        self.description = description
        self.measured = measured
        self.call = call
        self.state = WaitState()
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None
        self.started_at = time.monotonic()
        self.seconds = 0.0
        self.warn_at = self.started_at + deadlines.warning()
        self.deadline = self.started_at + deadlines.deadline()
        self.failed_at = 0.0
        self.awaited = False
        #: Whether this process posts no other operation until this one has ended.
        self.blocks = False
        #: Since when another process and this one seem to wait for each other.
        self.deadlocked_since: float | None = None
        self._operation = operation
        self._continues = False
        self._raised: Exception | None = None  # by MPI

    @property
    def name(self) -> str:
        """The description without details."""
        return self.description.partition(",")[0]

    def wait(self, busy: Callable[[], bool] | None) -> Any:
        """Waits for the result of the operation, and raises its error.

        ``busy`` says whether this process may still post other operations.
        """
        while busy is not None and not self.done.wait(_BUSY_SECONDS) and busy():
            pass
        self.blocks = True
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result

    def step(self) -> None:
        """Advances the operation as far as possible without waiting."""
        try:
            self.state = self._advance()
        except StopIteration as end:
            self.result = end.value
            self.seconds = time.monotonic() - self.started_at
            self.done.set()
        except JdasoError as error:
            self.fail(error)
        except BaseException as error:  # an error of MPI, which does not name the operation
            failure = JdasoError(f"{self.description} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)

    def postpone(self, seconds: float) -> None:
        self.started_at += seconds
        self.warn_at += seconds
        self.deadline += seconds

    def fail(self, error: BaseException) -> None:
        self.error, self.failed_at = error, time.monotonic()
        self.done.set()

    def can_continue(self) -> bool:
        """Whether one of its MPI requests has completed or failed, or it waits for none.

        It calls MPI at most once.
        """
        requests = self.state.requests
        if requests and not self._continues:
            try:
                self._continues = requests[0].Testany(requests)[1]
            except Exception as error:
                self._continues, self._raised = True, error
        return not requests or self._continues

    def _advance(self) -> WaitState:
        if not self.can_continue():
            return self.state._replace(progressed=False)
        self._continues, raised, self._raised = False, self._raised, None
        # The operation may handle an error of MPI.
        return next(self._operation) if raised is None else self._operation.throw(raised)


def completed(request: Request | None) -> Operation:
    """Waits for another request, if there is one, and raises its error."""
    while request is not None and not request.done.is_set():
        yield WaitState()
    if request is not None and request.error is not None:
        raise request.error
