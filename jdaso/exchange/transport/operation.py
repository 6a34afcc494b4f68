"""Operations: communication in several steps, as generators that the progress thread advances.

An operation posts MPI requests. Whenever it must wait for them, it yields a :class:`WaitState`
instead, and the thread resumes it later. Its result is what the generator returns.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jdaso.core.mpi_types import MpiRequest

# Operations that ``interleave`` runs at a time. Enough to keep a fast network busy between polls.
WINDOW = 8


class WaitState(NamedTuple):
    ranks: frozenset[int]  # of the communicator, whose messages are missing
    progressed: bool = False  # since its previous state
    requests: tuple[MpiRequest, ...] = ()  # if not empty, it waits for one of them to complete
    needs_repair: bool = False  # it can continue only after the communicators are repaired


class Repaired(Exception):
    """Thrown into running operations after the communicators have been repaired."""


Operation = Generator[WaitState, None, Any]


def wait_for(requests: Mapping[int, MpiRequest | None]) -> Operation:
    """Waits until all requests, given by the peer's rank, have completed."""
    pending = {peer: request for peer, request in requests.items() if request is not None}
    before = None
    while pending := {peer: request for peer, request in pending.items() if not request.Test()}:
        yield WaitState(frozenset(pending), len(pending) != before, tuple(pending.values()))
        before = len(pending)


def in_world_ranks(operation: Operation, ranks: Sequence[int]) -> Operation:
    """Runs an operation, and replaces each rank r that it waits for by ``ranks[r]``."""
    while True:
        try:
            state = next(operation)
        except StopIteration as end:
            return end.value
        yield state._replace(ranks=frozenset(ranks[rank] for rank in state.ranks))


def interleave(operations: Iterable[Operation]) -> Operation:
    """Runs operations interleaved, and returns the sum of their results.

    Operation i starts when the operations up to i - WINDOW have completed, so none runs further
    ahead of a late one than that. A limit on the number of active operations would allow it.
    """
    rest = enumerate(operations)
    active: dict[int, Operation] = {}
    result = started = 0
    while True:
        oldest = min(active, default=started)
        for number, operation in islice(rest, oldest + WINDOW - started):
            active[number] = operation
            started += 1
        if not active:
            return result
        ranks: frozenset[int] = frozenset()
        requests: tuple[MpiRequest, ...] = ()
        progressed = poll = False
        for number, operation in list(active.items()):
            try:
                state = next(operation)
                ranks, requests = ranks | state.ranks, requests + state.requests
                progressed, poll = progressed or state.progressed, poll or not state.requests
            except StopIteration as end:
                del active[number]
                # The next operation can start at once, whatever the others wait for.
                result, progressed, poll = result + end.value, True, True
        if active:  # even if no rank is known, as for the root of a broadcast
            yield WaitState(ranks, progressed, () if poll else requests)
