"""A thread that advances MPI operations while training computes.

MPI makes progress only inside its own calls. A plain ``Iallreduce`` therefore hides almost nothing,
and a thread in a blocking call occupies a core that training needs. This thread polls every posted
operation and sleeps in between, longer on a slow network, as each poll takes time from training.
"""

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from jdaso.cluster.ending import at_exit
from jdaso.cluster.roll_call import Call
from jdaso.cluster.topology import Topology
from jdaso.core.types import JdasoError
from jdaso.exchange.transport.deadlines import Deadlines
from jdaso.exchange.transport.operation import Operation
from jdaso.exchange.transport.peers import Peers
from jdaso.exchange.transport.polling import Polling
from jdaso.exchange.transport.request import Request

# After a longer pause between two looks, the process was stopped or the machine was suspended.
_SUSPENDED_SECONDS = 5.0
# If nobody has awaited an error for this long, the program is blocked somewhere else.
_UNAWAITED_SECONDS = 60.0
# Failed requests of closed exchanges. They are kept until the process ends, because MPI may still
# write to their buffers.
_kept: list[Request] = []


class Progress:
    """One thread that advances all operations of one exchange.

    Args:
        timeout: Least seconds until an operation fails.
        announce_exit: Called with this object when it closes. Waits until this process may exit.
        abort: ``(reason)``, ends the job if an operation cannot complete at exit, or if it fails
            and nobody awaits it.
    """

    def __init__(
        self,
        topology: Topology,
        timeout: float,
        announce_exit: Callable[["Progress"], None],
        abort: Callable[[str], None],
    ):
        self._announce_exit, self._abort = announce_exit, abort
        self._peers = Peers(topology)
        self._deadlines = Deadlines(timeout)
        self._requests: list[Request] = []
        self._failed: list[Request] = []
        self._lock = threading.Lock()
        self._closing = self._closed = False
        self._polling = Polling()
        self._thread = threading.Thread(target=self._run, name="jdaso-progress", daemon=True)
        self._thread.start()
        self._forget = at_exit(functools.partial(_close_at_exit, self))

    def submit(
        self,
        operation: Operation,
        description: str,
        measured: bool = False,
        call: Call | None = None,
        last: bool = False,
    ) -> Request:
        """Starts an operation and returns at once; the other arguments are those of Request.

        The ``last`` operation starts while this object closes, and may take any time.
        """
        request = Request(operation, description, measured, self._deadlines, call)
        request.deadline = math.inf if last else request.deadline
        with self._lock:
            if self._closing and not last:
                raise JdasoError(
                    f"{description} cannot start: the exchange is closed, or the interpreter is "
                    "exiting."
                )
            self._requests.append(request)
            self._polling.wake()
        return request

    def wait(self, request: Request, busy: Callable[[], bool] | None = None) -> Any:
        """The result of an operation; JdasoError with the missing ranks if it failed or is late."""
        request.awaited = True
        with self._polling.hurried():
            return request.wait(busy)

    def close(self) -> None:
        """Completes all operations, announces the exit, and leaves MPI ready to be finalized."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            unawaited = [request for request in self._failed if not request.awaited]
            unfinished = list(dict.fromkeys([*unawaited, *self._requests]))
            self._polling.wake()
        self._forget()
        for request in unfinished:
            request.done.wait()
        if errors := [str(request.error) for request in unfinished if request.error is not None]:
            self._abort(
                f"{self._peers.own_name} failed: exit with an exchange in flight that cannot "
                f"complete: {'; '.join(errors)}"
            )
        self._announce_exit(self)
        with self._lock:
            self._closed = True
            self._polling.wake()
        self._thread.join()
        _kept.extend([*self._failed, *self._requests])  # the latter if the thread has failed

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # Nobody may wait for a thread that has ended.
            with self._lock:
                self._closing = True
                for request in self._requests:
                    request.fail(error)

    def _loop(self) -> None:
        polling = self._polling
        while (requests := self._next_requests()) or not self._closed:
            if (paused := polling.look()) > _SUSPENDED_SECONDS:
                for request in requests:
                    request.postpone(paused)
            self._abort_if_unawaited()
            for request in requests:
                request.step()
                self._peers.check(request, polling.looked_at)
            polling.note([r.state for r in requests if not r.done.is_set()])
            if requests and not self._remove_completed(requests):
                polling.poll(requests)

    def _next_requests(self) -> list[Request]:
        """The requests. Without any, it waits for the next one, or until it is time to look."""
        if not self._requests and not self._closed:
            unawaited = not all(request.awaited for request in self._failed)
            self._polling.sleep(_UNAWAITED_SECONDS if unawaited else -1)
            self._polling.reset()
        with self._lock:
            return list(self._requests)

    def _remove_completed(self, requests: list[Request]) -> bool:
        """Removes the requests that have completed or failed; returns whether there were any."""
        completed = [request for request in requests if request.done.is_set()]
        for request in completed:
            self._peers.forget(request)
            if request.error is not None:
                self._failed.append(request)
            elif request.measured:
                self._deadlines.note(request.seconds)
        if completed:
            with self._lock:
                self._requests = [r for r in self._requests if not r.done.is_set()]
        return bool(completed)

    def _abort_if_unawaited(self) -> None:
        """Aborts the job for an error that the program would never see."""
        for request in [] if self._closing else self._failed:
            if not request.awaited and time.monotonic() - request.failed_at > _UNAWAITED_SECONDS:
                request.awaited = True
                self._abort(
                    f"{self._peers.own_name} failed, and its program does not wait for the "
                    f"result: {request.error}"
                )


def _close_at_exit(progress: Progress) -> None:
    """Closes, and ends the job if that fails. Python would print the error and exit with 0."""
    try:
        progress.close()
    except JdasoError as error:
        progress._abort(f"{progress._peers.own_name} failed: {error}")
