"""What heartbeats say: which processes are silent, and who has not posted an operation.

Reports go up to the first process and down again. On the way up, each process merges those of the
processes that report to it, so a report does not grow with the number of processes.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jdaso.cluster.roll_call import (
    Answer,
    Call,
    RollCall,
    decode,
    decode_calls,
    earliest,
    encode,
    merge,
)


class Report(NamedTuple):
    """Upwards it is about the sender and all that report to it, downwards about all processes."""

    silent: frozenset[int] = frozenset()
    questions: tuple[Call, ...] = ()
    answers: Mapping[Call, Answer] = MappingProxyType({})

    def message(self) -> list[Any]:
        return [sorted(self.silent), [list(call) for call in self.questions], encode(self.answers)]


class Reports:
    """The last report of each peer, and what follows from them.

    Attributes:
        silent: Ranks from which nothing was received for some time.
        unconnected: Ranks without a connection.
    """

    def __init__(
        self,
        rank: int,
        parent: int,
        describe: Callable[[int], str],
        unconnected: frozenset[int],
        roll_call: RollCall,
    ):
        self._rank, self._parent = rank, parent
        self._describe, self._roll_call = describe, roll_call
        self.unconnected = unconnected
        self._heard: dict[int, Report] = {}
        self._sent: dict[int, list[Any]] = {}
        self.silent: frozenset[int] = frozenset()

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks and their hosts, and says whether each is alive or silent."""
        silent = self.silent
        unknown = ranks - {0, self._rank} - silent if 0 in silent else frozenset()
        known = ranks - silent - unknown
        groups = {
            "silent: stopped, or its host or link is down": ranks & silent,
            "unknown: it has no heartbeat connection": known & self.unconnected,
            "unknown: rank 0, which forwards the states of other ranks, is silent": unknown,
            "alive: slower, at another step, or busy with something else": (
                known - self.unconnected
            ),
        }
        texts = [
            f"{', '.join(map(self._describe, sorted(group)))} ({state})"
            for state, group in groups.items()
            if group
        ]
        return "; ".join(texts) or "the other processes"

    def receive(self, rank: int, silent: list, questions: list, answers: list) -> None:
        """Keeps the report of a peer. What is malformed is left out."""
        ranks = frozenset(rank for rank in silent if isinstance(rank, int))
        self._heard[rank] = Report(ranks, tuple(decode_calls(questions)), decode(answers))

    def forget(self, rank: int) -> None:
        self._heard.pop(rank, None)

    def repeat(self) -> None:
        """Sends reports again, also if they are the same as before."""
        self._sent.clear()

    def messages(self, peers: Iterable[int], silent_peers: frozenset[int]) -> dict[int, list[Any]]:
        """The new messages for peers, by rank."""
        below = [self._heard.get(rank, Report()) for rank in peers if rank != self._parent]
        above = self._heard.get(self._parent)
        silent = silent_peers.union(*(report.silent for report in below)) - {self._parent}
        asked = [*self._roll_call.questions(), *(c for report in below for c in report.questions)]
        questions = tuple(earliest(asked))
        answers = {
            call: merge(
                [self._roll_call.answer_to(call)]
                + [report.answers[call] for report in below if call in report.answers]
            )
            for call in (above.questions if above else questions)
        }
        up = Report(silent, questions, answers)
        down = above or up
        self.silent = down.silent | silent_peers
        self._roll_call.answers = down.answers
        messages = {rank: (up if rank == self._parent else down).message() for rank in peers}
        new = {rank: text for rank, text in messages.items() if self._sent.get(rank) != text}
        self._sent |= new
        return new
