"""Operations: communication in several steps, as generators that the progress thread advances.

An operation posts MPI requests. Whenever it must wait for them, it yields a :class:`WaitState`
instead, and the thread resumes it later. Its result is what the generator returns.
"""

import time
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from jdaso.cluster.mpi_types import MpiRequest

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
