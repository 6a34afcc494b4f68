"""What heartbeats say: which processes are silent or dead, and who has not posted an operation.

Reports go up to the first process and down again. On the way up, each process merges those of the
processes that report to it, so a report does not grow with the number of processes.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

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
from jdaso.cluster.tree import connected


class Report(NamedTuple):
    """Upwards it is about the sender and all that report to it, downwards about all processes."""

    silent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    questions: tuple[Call, ...] = ()
    answers: Mapping[Call, Answer] = MappingProxyType({})

    def message(self) -> list[Any]:
        calls = [list(call) for call in self.questions]
        return [sorted(self.silent), sorted(self.dead), calls, encode(self.answers)]


class Reports:
    """The last report of each peer, and what follows from them.

    Attributes:
        silent: Ranks from which nothing was received for some time.
        dead: Ranks whose death all processes tolerate.
        unconnected: Ranks without a connection to their parents.
    """

    def __init__(
        self,
        rank: int,
        tree: np.ndarray,
        describe: Callable[[int], str],
        unconnected: frozenset[int],
        roll_call: RollCall,
    ):
        self._rank, self._tree, self._parent = rank, tree, int(tree[rank])
        self._describe, self._roll_call = describe, roll_call
        self.unconnected = unconnected
        self._heard: dict[int, Report] = {}
        self._sent: dict[int, list[Any]] = {}
        self.silent: frozenset[int] = frozenset()
        self.dead: frozenset[int] = frozenset()

    def connected(self) -> np.ndarray:
        """For each rank, whether its heartbeats arrive here, bool[P]."""
        return connected(self._tree, self._rank, self.unconnected, self.silent | self.dead)

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks and their hosts, and says whether each is alive or silent."""
        arrives = self.connected()
        known = frozenset(rank for rank in ranks - self.silent if arrives[rank])
        groups = {
            "silent: stopped, or its host or link is down": ranks & self.silent,
            "unknown: no heartbeat connection leads to it": ranks - self.silent - known,
            "alive: slower, at another step, or busy with something else": known,
        }
        texts = [
            f"{', '.join(map(self._describe, sorted(group)))} ({state})"
            for state, group in groups.items()
            if group
        ]
        return "; ".join(texts) or "the other processes"

    def receive(self, rank: int, silent: list, dead: list, questions: list, answers: list) -> None:
        """Keeps the report of a peer. What is malformed is left out."""
        calls = tuple(decode_calls(questions))
        self._heard[rank] = Report(self._ranks(silent), self._ranks(dead), calls, decode(answers))

    def _ranks(self, numbers: list) -> frozenset[int]:
        size = len(self._tree)
        return frozenset(n for n in numbers if isinstance(n, int) and 0 <= n < size)

    def disconnect(self, rank: int) -> None:
        """Forgets a peer whose connection is closed."""
        self._heard.pop(rank, None)
        self.unconnected |= {self._rank if rank == self._parent else rank}

    def repeat(self) -> None:
        """Sends reports again, also if they are the same as before."""
        self._sent.clear()

    def messages(self, peers: Iterable[int], silent_peers: frozenset[int]) -> dict[int, list[Any]]:
        """The new messages for peers, by rank."""
        below = [self._heard.get(rank, Report()) for rank in peers if rank != self._parent]
        # What a silent parent has said before is not passed on.
        above = None if self._parent in silent_peers else self._heard.get(self._parent)
        self.dead = self.dead.union(*(report.dead for report in self._heard.values()))
        silent = silent_peers.union(*(report.silent for report in below))
        asked = [*self._roll_call.questions(), *(c for report in below for c in report.questions)]
        questions = tuple(earliest(asked))
        answers = {
            call: merge(
                [self._roll_call.answer_to(call)]
                + [report.answers[call] for report in below if call in report.answers]
            )
            for call in (above.questions if above else questions)
        }
        up = Report(silent - {self._parent}, self.dead, questions, answers)
        down = above._replace(dead=self.dead) if above else up._replace(silent=silent)
        self.silent = down.silent | silent_peers
        self._roll_call.answers = down.answers
        messages = {rank: (up if rank == self._parent else down).message() for rank in peers}
        new = {rank: text for rank, text in messages.items() if self._sent.get(rank) != text}
        self._sent |= new
        return new
