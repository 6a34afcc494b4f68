"""The other processes, as a progress thread sees them: late, silent, or exited."""

from jdaso.cluster.roll_call import Answer, name_ranks
from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.core.types import JdasoError
from jdaso.exchange.transport.handshake import closed_without
from jdaso.exchange.transport.request import Request

_ASK_SECONDS = 1.0
_UNKNOWN = "other processes (unknown which)"
# Two processes that wait for each other are given this time, because their reports may be outdated.
_DEADLOCK_SECONDS = 10.0


class Peers:
    """The other processes of a topology: those that are late, and those that have exited."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self._describe = topology.describe
        heartbeat = topology.heartbeat
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
        for process in absent if request.blocks else ():
            # Both programs wait, each for an operation that the other one has not posted.
            if roll_call and process.awaited and not roll_call.has_posted(process.awaited):
                request.deadlocked_since = request.deadlocked_since or now
                if now - request.deadlocked_since < _DEADLOCK_SECONDS:
                    return None
                return (
                    f"{self._describe(process.rank)} has not posted it and waits for "
                    f"{process.name}, which {self.own_name} has not posted. All nodes must make "
                    "the same calls in the same order. Do not put such a call inside an `if` that "
                    "only one node enters."
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
        ranks = heartbeat.silent_ranks() | heartbeat.exited_ranks()
        ranks |= {process.rank for process in answer.names}
        if not ranks:
            complete = answer.answered == len(self.topology.processes)
            return "the network: all processes have posted it" if complete else _UNKNOWN
        texts = [heartbeat.states(ranks)]
        if answer.absent > len(answer.names):
            texts.append(f"and {answer.absent - len(answer.names)} more")
        texts += [f"{self._describe(p.rank)} waits for {p.name}" for p in answer.names if p.awaited]
        return "; ".join(texts)
