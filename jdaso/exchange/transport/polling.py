"""When the progress thread polls MPI. It sleeps in between."""

import contextlib
import time
from collections.abc import Iterator, Sequence

from jdaso.exchange.host.slots import PlainTable, Table
from jdaso.exchange.transport.operation import WaitState
from jdaso.exchange.transport.request import Request

# While no MPI request completes, the thread looks this often at operations and deadlines.
_LOOK_SECONDS = 0.1
# The pause between two polls is a fraction of the time since the last progress, within these
# limits. The longest pause is short enough that a slow link's send buffers do not run empty. The
# limit is lower while an operation waits for a peer's message that it cannot name as an MPI
# request.
_SHORTEST_SECONDS, _LONGEST_SECONDS, _LONGEST_SERVING_SECONDS = 5e-4, 10e-3, 2e-3
_POLLS_PER_PROGRESS = 4
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

    def __init__(self, table: Table | PlainTable | None = None) -> None:
        self._table = table or PlainTable()
        self._awaited = False
        self._pause, self._longest = _SHORTEST_SECONDS, _LONGEST_SECONDS
        self.reset()

    def reset(self) -> None:
        """Restarts both clocks after an idle time."""
        self.looked_at = self._progressed_at = time.monotonic()

    def wake(self) -> None:
        """Ends the sleep, or else the next one; called by any thread."""
        self._table.wake()

    @contextlib.contextmanager
    def hurried(self) -> Iterator[None]:
        """Polls often, because the program waits; called by any thread."""
        self._table.hurry(1)
        try:
            yield
        finally:
            self._table.hurry(-1)

    def look(self) -> float:
        """Starts to look at all operations, and returns the seconds since it did so before."""
        before, self.looked_at = self.looked_at, time.monotonic()
        return self.looked_at - before

    def note(self, states: Sequence[WaitState]) -> None:
        """Notes the states of the operations, and whether one of them has progressed."""
        serving = not all(state.requests for state in states)
        self._longest = _LONGEST_SERVING_SECONDS if serving else _LONGEST_SECONDS
        if any(state.progressed for state in states):
            self._pause = (self.looked_at - self._progressed_at) / _POLLS_PER_PROGRESS
            self._progressed_at = self.looked_at

    def poll(self, requests: Sequence[Request]) -> None:
        """Polls until an operation can continue, or it is time to look at all of them.

        Between two looks, a poll is a pause and at most one call of MPI for each operation.
        """
        look_at = self.looked_at + _LOOK_SECONDS
        while not self.sleep(self.pause()):
            if any(r.can_continue() for r in requests) or time.monotonic() > look_at:
                return

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

    def sleep(self, seconds: float) -> bool:
        """Sleeps; whether news have ended it earlier. -1 is forever."""
        return self._table.wait(seconds)
