"""A thread that advances MPI operations while training computes.

MPI makes progress only inside its own calls. A plain ``Iallreduce`` therefore hides almost nothing,
and a thread in a blocking call occupies a core that training needs. This thread polls every posted
operation and sleeps in between, longer on a slow network, as each poll takes time from training.

The file begins with what the thread advances, an operation, and the request that holds it with its
deadline. :class:`Polling` says when the thread looks, :class:`Peers` what it knows of processes
that are late, and :class:`Progress` is the thread.
"""

import contextlib
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jdaso.cluster.ending import at_exit, say_once
from jdaso.cluster.mpi_types import MpiRequest
from jdaso.cluster.roll_call import Answer, Call, name_ranks
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.exchange.host.slots import Table

_POLL_SECONDS = 1e-4


class WaitState(NamedTuple):
    """What an operation waits for."""

    ranks: frozenset[int] = frozenset()  # whose messages are missing, where that is known
    progressed: bool = False  # since its previous state
    requests: tuple[MpiRequest, ...] = ()  # if not empty, it waits for one of them to complete


Operation = Generator[WaitState, None, Any]


def wait_for(requests: Iterable[MpiRequest]) -> Operation:
    """Waits until all requests have completed."""
    pending, before = list(requests), None
    while pending := [request for request in pending if not request.Test()]:
        yield WaitState(progressed=len(pending) != before, requests=tuple(pending))
        before = len(pending)


def run(operation: Operation) -> Any:
    """The result of an operation that the calling thread advances."""
    while True:
        try:
            next(operation)
        except StopIteration as end:
            return end.value
        time.sleep(_POLL_SECONDS)


# Durations that are kept, and how many of them a median needs.
_KEPT, _ENOUGH = 100, 5
# The sigma of a normal distribution is about 1.5 median deviations.
_WARNING_DEVIATIONS, _DEADLINE_DEVIATIONS = 20.0, 200.0
_WARNING_SECONDS = 30.0


class Deadlines:
    """Computes when an operation is late and when it fails.

    Let m be the median of the last hundred durations, and D the median of their distances from m.
    An operation is late after ``max(30 s, m + 20 D)``, with ``timeout / 2`` in place of 30 s where
    that is less. It fails after ``max(timeout, m + 200 D)``. A link that is always slow causes
    neither warnings nor errors.

    Args:
        timeout: Least seconds until an operation fails. With infinity, none is ever late.

    >>> deadlines = Deadlines(timeout=60.0)
    >>> for seconds in (50.0, 52.0, 48.0, 50.0, 51.0):
    ...     deadlines.note(seconds)
    >>> deadlines.warning(), deadlines.deadline()
    (70.0, 250.0)
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def warning(self) -> float:
        """Seconds after which an operation is late."""
        if math.isinf(self._timeout):
            return math.inf
        return self._limit(min(_WARNING_SECONDS, self._timeout / 2), _WARNING_DEVIATIONS)

    def deadline(self) -> float:
        """Seconds after which an operation fails."""
        return self._limit(self._timeout, _DEADLINE_DEVIATIONS)

    def _limit(self, least: float, deviations: float) -> float:
        # Neither median nor deviation is above the longest duration. So those of short exchanges,
        # whose CPU time counts most, need not be computed.
        seconds = list(self._seconds)  # a copy, because another thread may append
        if len(seconds) < _ENOUGH or (1 + deviations) * max(seconds) <= least:
            return least
        median = statistics.median(seconds)
        deviation = statistics.median(abs(s - median) for s in seconds)
        return max(least, median + deviations * deviation)


_BUSY_SECONDS = 0.5  # between two looks at whether a process is busy


class Request:
    """A submitted operation; ``done`` is set when it has returned or failed.

    The ``description`` is the subject of error messages, such as ``"exchange 3, posted by rank
    0,"``. If ``measured``, the operation's duration sets the deadlines of later ones. ``call`` says
    which operation of all processes it is, if it is one. ``slot`` is that of an exchange.
    """

    def __init__(
        self,
        operation: Operation,
        description: str,
        deadlines: Deadlines,
        call: Call | None,
        slot: Any = None,
        measured: bool = False,
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
        self.slot = slot
        self._number = None if slot is None else slot.number
        self._awaited = self._blocks = False
        #: Whether it goes on waiting for processes that wait for this one.
        self.patient = False
        #: Since when another process and this one seem to wait for each other.
        self.deadlocked_since: float | None = None
        self._operation = operation
        self._continues = False
        self._raised: Exception | None = None  # by MPI

    @property
    def awaited(self) -> bool:
        """Whether the program has waited for it, or never will, because its slot has been freed."""
        if self.slot is None or self._awaited:
            return self._awaited
        return bool(self.slot.awaited) or self.slot.number != self._number

    @awaited.setter
    def awaited(self, value: bool) -> None:
        self._awaited = value

    @property
    def blocks(self) -> bool:
        """Whether this process posts no other operation until this one has ended."""
        return self._blocks or (self.slot is not None and bool(self.slot.awaited))

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
        self._blocks = True
        self.done.wait()
        if self.error is not None:
            raise self.error
        return self.result

    def step(self) -> None:
        """Advances the operation as far as possible without waiting."""
        if not self.can_continue():
            self.state = self.state._replace(progressed=False)
            return
        self._continues, raised, self._raised = False, self._raised, None
        try:
            # The operation may handle an error of MPI.
            self.state = next(self._operation) if raised is None else self._operation.throw(raised)
        except StopIteration as end:
            self.result = end.value
            self.seconds = time.monotonic() - self.started_at
            self.done.set()
        except JdasoError as error:
            self.fail(error)
        except BaseException as error:  # an error of MPI, which does not name the operation
            self.fail(JdasoError(f"{self.description} failed: {type(error).__name__}: {error}"))

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


def completed(request: Request | None) -> Operation:
    """Waits for another request, if there is one, and raises its error."""
    while request is not None and not request.done.is_set():
        yield WaitState()
    if request is not None and request.error is not None:
        raise request.error


# While no MPI request completes, the thread looks this often at operations and deadlines.
_LOOK_SECONDS = 0.1
# The pause between two polls is a fraction of the time since the last progress, within these
# limits. MPI moves bytes in polls only, so the longest pause is short on a fast network. It grows
# with the time that the operation has taken, until polls cost no more than a slow link allows, and
# stays short enough that the send buffers of that link do not run empty. It does not grow while an
# operation waits for a peer's message that it cannot name as an MPI request.
_SHORTEST_SECONDS, _LONGEST_SECONDS, _LONGEST_ON_SLOW_LINKS = 5e-4, 2e-3, 10e-3
_POLLS_PER_PROGRESS, _POLLS_PER_OPERATION = 4, 128
# While the program waits for a result, latency counts, but other processes may need the core. The
# pause is a sixteenth of the time since the last progress, so that a long wait needs few polls.
_AWAITED_SECONDS, _POLLS_PER_AWAITED = (5e-5, 2e-3), 16


class Polling:
    """Sleeps between two polls. The pause grows while no operation progresses.

    Args:
        table: The slots whose news end a sleep. It also counts those who wait for a result.

    Attributes:
        looked_at: When the thread last looked at all operations.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._awaited = False
        self._pause, self._longest = _SHORTEST_SECONDS, _LONGEST_SECONDS
        self.reset()

    def reset(self) -> None:
        """Restarts both clocks after an idle time."""
        self.looked_at = self._progressed_at = time.monotonic()

    def look(self) -> float:
        """Starts to look at all operations, and returns the seconds since it did so before."""
        before, self.looked_at = self.looked_at, time.monotonic()
        return self.looked_at - before

    def note(self, states: Sequence[WaitState], since: float) -> None:
        """Notes the states of the operations, and whether one of them has progressed.

        The operation that takes the longest has begun at ``since``.
        """
        self._longest = _LONGEST_SECONDS
        if all(state.requests for state in states):
            taken = (self.looked_at - since) / _POLLS_PER_OPERATION
            self._longest = max(_LONGEST_SECONDS, min(taken, _LONGEST_ON_SLOW_LINKS))
        if any(state.progressed for state in states):
            self._pause = (self.looked_at - self._progressed_at) / _POLLS_PER_PROGRESS
            self._progressed_at = self.looked_at

    def poll(self, requests: Sequence[Request]) -> bool:
        """Polls until an operation can continue, or it is time to look at all of them.

        Between two looks, a poll is a pause and at most one call of MPI for each operation.

        Returns:
            Whether it has ended because there are news of the slots.
        """
        look_at = self.looked_at + _LOOK_SECONDS
        while not self._table.wait(self.pause()):
            if any(r.can_continue() for r in requests) or time.monotonic() > look_at:
                return False
        return True

    def pause(self) -> float:
        """Seconds until the next poll."""
        before, self._awaited = self._awaited, self._table.hurry(0) > 0
        if self._awaited and not before:
            self._progressed_at = time.monotonic()
        quiet = time.monotonic() - self._progressed_at
        if self._awaited:
            shortest, longest = _AWAITED_SECONDS
            return max(shortest, min(quiet / _POLLS_PER_AWAITED, longest))
        self._pause = max(quiet / _POLLS_PER_PROGRESS, self._pause, _SHORTEST_SECONDS)
        self._pause = min(self._pause, self._longest)
        return self._pause


_ASK_SECONDS = 1.0
_UNKNOWN = "other processes (unknown which)"
# Two processes that wait for each other are given this time, because their reports may be outdated.
_DEADLOCK_SECONDS = 10.0


class Peers:
    """The other processes of a topology: those that are late, and those that have exited."""

    def __init__(self, topology: Topology):
        self.topology = topology
        heartbeat = topology.heartbeat
        # The heartbeat numbers all processes, also where the topology is restricted to some.
        self._describe = heartbeat.describe if heartbeat is not None else topology.describe
        self._members = frozenset(process.rank for process in topology.processes)
        self._roll_call = heartbeat.roll_call if heartbeat is not None else None

    @property
    def own_name(self) -> str:
        """Rank and host of this process."""
        return self.topology.describe(self.topology.rank)

    def check(self, request: Request, now: float) -> None:
        """Fails a request that cannot complete or whose deadline has passed. Warns of delays."""
        if request.done.is_set() or now - request.started_at < _ASK_SECONDS:
            return
        if self._roll_call and request.call:
            self._roll_call.ask(request.call)
            if request.blocks:
                self._roll_call.wait(request.call, request.name)
        if reason := self._cannot_complete(request, now):
            request.fail(JdasoError(f"{request.description} cannot complete: {reason}"))
        elif now > request.deadline:
            request.fail(
                JdasoError(
                    f"{request.description} did not complete within "
                    f"{request.deadline - request.started_at:g} s: nothing came from "
                    f"{self._missing(request)}. The argument timeout of mpi_exchange and "
                    "mpi_center sets the least time to wait."
                )
            )
        elif now > request.warn_at:
            seconds = now - request.started_at
            request.warn_at = now + seconds
            text = "%s is late, for %.0f s now: it waits for %s."
            logger.warning(text, request.description, seconds, self._missing(request))

    def forget(self, request: Request) -> None:
        """Asks no more about a request that has completed or failed."""
        if self._roll_call and request.call:
            self._roll_call.done(request.call)

    def _cannot_complete(self, request: Request, now: float) -> str | None:
        """Why a request will never complete, if that is known."""
        absent, roll_call = self._answer(request).names, self._roll_call
        if closed := [process.rank for process in absent if process.closed]:
            return closed_without(name_ranks(closed, self._describe))
        for process in absent if request.blocks and not request.patient else ():
            # Both programs wait, each for an operation that the other one has not posted.
            if roll_call and process.awaited and not roll_call.has_posted(process.awaited):
                request.deadlocked_since = request.deadlocked_since or now
                if now - request.deadlocked_since < _DEADLOCK_SECONDS:
                    return None
                advice = "Do not put such a call inside an `if` that only one node enters."
                if process.name == request.name:
                    advice = "The two are of different exchanges: give each a name=."
                return (
                    f"{self._describe(process.rank)} has not posted it and waits for "
                    f"{process.name}, which {self.own_name} has not posted. All nodes must make "
                    f"the same calls in the same order. {advice}"
                )
        request.deadlocked_since = None
        return None

    def _answer(self, request: Request) -> Answer:
        if self._roll_call is None or request.call is None:
            return Answer()
        return self._roll_call.answer(request.call)

    def _missing(self, request: Request) -> str:
        """The processes for which a request waits, as far as they are known."""
        if request.state.ranks:
            return self.topology.states(request.state.ranks)
        heartbeat, answer = self.topology.heartbeat, self._answer(request)
        if heartbeat is None:
            return _UNKNOWN
        ranks = self._members & (heartbeat.silent_ranks() | heartbeat.exited_ranks())
        ranks |= {process.rank for process in answer.names}
        if not ranks:
            complete = answer.answered == len(self.topology.processes)
            return "the network: all processes have posted it" if complete else _UNKNOWN
        texts = [heartbeat.states(ranks)]
        if answer.absent > len(answer.names):
            texts.append(f"and {answer.absent - len(answer.names)} more")
        texts += [f"{self._describe(p.rank)} waits for {p.name}" for p in answer.names if p.awaited]
        return "; ".join(texts)


def closed_without(names: str) -> str:
    """Why an operation cannot complete in which processes have not taken part."""
    return (
        f"{names} closed this exchange, or exited, without taking part. All nodes must take the "
        "same number of steps and make the same calls."
    )


# After a longer pause between two looks, the process was stopped or the machine was suspended.
_SUSPENDED_SECONDS = 5.0
# If nobody has awaited an error for this long, the program is blocked somewhere else.
_UNAWAITED_SECONDS = 60.0
# Failed requests of closed exchanges. They are kept until the process ends, because MPI may still
# write to their buffers.
_kept: list[Request] = []


# JAX would log the error of a callback before it raises it.
logging.getLogger("jax._src.callback").addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], JdasoError))
)


class Progress:
    """One thread that advances all operations of one exchange.

    Args:
        timeout: Least seconds until an operation fails.
        announce_exit: Called with this object when it closes. Waits until this process may exit.
        abort: ``(reason)``, ends the job if an operation cannot complete at exit, or if it fails
            and nobody awaits it.
        table: The slots that it serves. It takes those that are filled, runs the operation that
            ``exchanges.take(slot)`` starts, and marks them done or failed.
    """

    def __init__(
        self,
        topology: Topology,
        timeout: float,
        announce_exit: Callable[["Progress"], None],
        abort: Callable[[str], None],
        table: Table | None = None,
    ):
        self._announce_exit, self._abort = announce_exit, abort
        self.table = table or Table()
        self.exchanges: Any = None  # an object with take and log_completed, such as MpiTransport
        self._peers = Peers(topology)
        self._deadlines = Deadlines(timeout)
        self._submitted: list[Request] = []  # until the thread takes them
        self._requests: list[Request] = []
        self._failed: list[Request] = []
        self._lock = threading.RLock()  # reentrant, because a signal handler may close
        self._closing = self._closed = False
        self._ended_by = ""  # the error with which the thread has ended
        self.abandons = False  # whether exchanges in flight may fail when it closes
        self._polling = Polling(self.table)
        self._thread = threading.Thread(target=self._run, name="jdaso-progress", daemon=True)
        self._thread.start()
        self._forget = at_exit(self._close_at_exit)

    def submit(
        self,
        operation: Operation,
        description: str,
        call: Call | None = None,
        last: bool = False,
    ) -> Request:
        """Starts an operation and returns at once; the other arguments are those of Request.

        The ``last`` operation starts while this object closes, and may take any time.
        """
        request = Request(operation, description, self._deadlines, call)
        request.deadline = math.inf if last and not self.abandons else request.deadline
        request.patient = last and self.abandons
        with self._lock:
            if self._closing and not last:
                raise JdasoError(
                    f"{description} cannot start: the exchange is closed, or the interpreter is "
                    "exiting."
                )
            self._submitted.append(request)
            self.table.wake()
        return request

    def start(
        self, slot: Any, operation: Operation, description: str, measured: bool, call: Call | None
    ) -> Request:
        """Starts the operation of a slot; called by ``exchanges.take``."""
        request = Request(operation, description, self._deadlines, call, slot, measured)
        with self._lock:
            self._requests.append(request)
        return request

    def wait(self, request: Request, busy: Callable[[], bool] | None = None) -> Any:
        """The result of an operation; JdasoError with the missing ranks if it failed or is late."""
        request.awaited = True
        self.table.hurry(1)  # polls often, because the program waits
        try:
            return request.wait(busy)
        finally:
            self.table.hurry(-1)

    def close(self) -> None:
        """Completes all operations, announces the exit, and leaves MPI ready to be finalized."""
        if not self._closing:
            self.table.close()
            with contextlib.suppress(JdasoError):  # after which the thread has taken all slots
                self.submit(wait_for(()), "the end of an exchange").done.wait()
        if self._ended_by:  # the others would wait for this process until they are stopped
            self._abort(
                f"{self._peers.own_name} failed: the thread of an exchange has failed with "
                f"{self._ended_by}"
            )
        with self._lock:
            if self._closing:
                return
            self._closing = True
            unawaited = [request for request in self._failed if not request.awaited]
            unfinished = list(dict.fromkeys([*unawaited, *self._requests, *self._submitted]))
            self.table.wake()
        self._forget()
        for request in unfinished:
            request.done.wait()
        errors = [str(request.error) for request in unfinished if request.error is not None]
        if errors and not self.abandons:
            self._abort(
                f"{self._peers.own_name} failed: exit with an exchange in flight that cannot "
                f"complete: {'; '.join(errors)}"
            )
        self._announce_exit(self)
        with self._lock:
            self._closed = True
            self.table.wake()
        self._thread.join()
        _kept.extend([*self._failed, *self._requests])  # the latter if the thread has failed

    def _close_at_exit(self) -> None:
        """Closes, and ends the job if that fails. Python would print the error and exit with 0."""
        try:
            self.close()
        except JdasoError as error:
            self._abort(f"{self._peers.own_name} failed: {error}")

    @contextlib.contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """A context in which an error of a host callback is reported."""
        try:
            yield
        except Exception as error:
            self._report_error(f"{type(error).__name__}: {error}")
            raise

    def _report_error(self, error: str) -> None:
        """Prints an error of a post or collect at once, and aborts if there are more devices.

        The other devices wait in a collective for the one that called the host. The program would
        therefore never raise the error. A program of one device raises it when it fetches a result,
        perhaps many steps later, in the words of XLA.
        """
        if self._peers.topology.mesh.size > 1:
            self._abort(f"{self._peers.own_name} failed: {error}")
        say_once(self._peers.own_name, error)

    def has_failed(self) -> bool:
        """Whether an operation has failed, so that messages of it may still arrive."""
        with self._lock:
            requests = [*self._failed, *self._requests, *self._submitted]
        return any(request.error is not None for request in requests)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            # Nobody may wait for a thread that has ended.
            self._ended_by = f"{type(error).__name__}: {error}"
            text = "%s: the thread of an exchange has failed with %s"
            logger.error(text, self._peers.own_name, self._ended_by)
            with self._lock:
                self._closing = True
                self._requests += self._submitted
                for request in self._requests:
                    request.fail(error)
                    self._end(request)
            # Collects of a closed table only say that it is closed, so slots first get the cause.
            self._fail_posted()
            self.table.close()
            self._fail_posted()  # those that were posted in between

    def _fail_posted(self) -> None:
        while slot := self.table.next():
            self.table.fail(slot, self._ended_by)

    def _loop(self) -> None:
        polling, news = self._polling, True
        while True:
            if news:
                self._take()
            if not self._requests:
                if self._closed:
                    return
                # Until there are news, or it is time to look for errors that nobody has awaited.
                unawaited = not all(request.awaited for request in self._failed)
                news = self.table.wait(_UNAWAITED_SECONDS if unawaited else -1)
                polling.reset()
                self._abort_if_unawaited()
                continue
            requests = list(self._requests)
            if (paused := polling.look()) > _SUSPENDED_SECONDS:
                for request in requests:
                    request.postpone(paused)
            self._abort_if_unawaited()
            for request in requests:
                request.step()
                self._peers.check(request, polling.looked_at)
            pending = [r for r in requests if not r.done.is_set()]
            since = min((r.started_at for r in pending), default=math.inf)
            polling.note([r.state for r in pending], since)
            ended = [r for r in requests if r.done.is_set()]
            for request in ended:
                self._peers.forget(request)
                self._end(request)
                if request.error is not None:
                    self._failed.append(request)
                elif request.measured:
                    self._deadlines.note(request.seconds)
            news = False  # unless ``poll`` hears of some
            if ended:
                with self._lock:
                    self._requests = [r for r in self._requests if not r.done.is_set()]
            else:  # If one has ended, the next exchange of its queue can begin at once.
                news = polling.poll(requests)

    def _take(self) -> None:
        """Takes what was submitted, and first the slots that were filled before that.

        Also reports errors of compiled programs.
        """
        # What is submitted meanwhile waits, because slots may have been filled before it.
        with self._lock:
            count = len(self._submitted)
        if self.exchanges is not None:
            for problem in self.table.problems():
                self._report_error(problem)
            while slot := self.table.next():
                try:
                    self.exchanges.take(slot)
                except BaseException as error:  # with which this thread ends
                    self.table.fail(slot, f"{type(error).__name__}: {error}")
                    raise
            self.exchanges.log_completed()
        with self._lock:
            self._requests += self._submitted[:count]
            del self._submitted[:count]

    def _end(self, request: Request) -> None:
        """Passes the result of an operation on to those who collect it."""
        if request.slot is None:
            return
        if request.error is not None:
            self.table.fail(request.slot, str(request.error))
        else:
            began, (total, sent) = request.started_at, request.result
            self.table.done(request.slot, total, sent, began, began + request.seconds)

    def _abort_if_unawaited(self) -> None:
        """Aborts the job for an error that the program would never see."""
        for request in [] if self._closing else self._failed:
            if not request.awaited and time.monotonic() - request.failed_at > _UNAWAITED_SECONDS:
                request.awaited = True
                self._abort(
                    f"{self._peers.own_name} failed, and its program does not wait for the "
                    f"result: {request.error}"
                )
