"""What heartbeats say: which processes are silent or dead, and who has not posted an operation.

Reports go up to the first process and down again. On the way up, each process merges those of the
processes that report to it, so a report does not grow with the number of processes.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jdaso.cluster.heartbeat_tree import connected, without
from jdaso.cluster.ranks import decode_ranks, encode_ranks, name_ranks
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
    """A message to a neighbour in the tree.

    To the parent, it covers the sender and all processes below it. To a child, it covers all.
    """

    silent: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()
    exited: frozenset[int] = frozenset()
    rerouted: frozenset[int] = frozenset()  # that report to another process than expected
    questions: tuple[Call, ...] = ()
    answers: Mapping[Call, Answer] = MappingProxyType({})

    def message(self) -> list[Any]:
        *ranks, questions, answers = self
        return [*map(encode_ranks, ranks), [list(call) for call in questions], encode(answers)]


class Reports:
    """The last report of each peer, and what follows from them.

    Attributes:
        silent: Ranks from which nothing was received for some time.
        dead: Ranks whose death all processes tolerate.
        exited: Ranks that have announced that they exit normally.
        unconnected: Ranks that could not connect to their parents at the start.
        missing: Ranks that should report to this one, and have not connected for
            ``SILENT_SECONDS``.
    """

    def __init__(
        self, rank: int, tree: np.ndarray, describe: Callable[[int], str], roll_call: RollCall
    ):
        self._rank, self._tree, self._describe, self._roll_call = rank, tree, describe, roll_call
        self._parent: int | None = None
        self.unconnected: frozenset[int] = frozenset()
        self.missing: frozenset[int] = frozenset()
        self._own_rerouted: frozenset[int] = frozenset()
        self._rerouted: frozenset[int] = frozenset()  # of all processes
        self._heard: dict[int, Report] = {}
        self._sent: dict[int, list[Any]] = {}
        self.silent: frozenset[int] = frozenset()
        self.dead: frozenset[int] = frozenset()
        self.exited: frozenset[int] = frozenset()

    @property
    def gone(self) -> frozenset[int]:
        """The other ranks that have died or exited."""
        return (self.dead | self.exited) - {self._rank}

    def connected(self) -> np.ndarray:
        """For each rank, whether its heartbeats arrive here, bool[P]."""
        top = {self._rank} if self._parent is None else set()
        cut = self.unconnected | top | (self.missing - self._rerouted)
        tree = without(self._tree, self.gone)
        return connected(tree, self._rank, cut, (self.silent | self.gone) - {self._rank})

    def not_among(self, peers: Collection[int]) -> frozenset[int]:
        """The ranks that should report to this one after deaths and exits, but are not peers."""
        if not (gone := self.gone):
            return frozenset()
        moved = (without(self._tree, gone) == self._rank) & (self._tree != self._rank)
        adopted = frozenset(np.flatnonzero(moved).tolist()) - gone - {self._rank}
        below = {rank for rank in peers if rank > self._rank and self._tree[rank] != self._rank}
        self._own_rerouted = frozenset(below - adopted)
        return adopted.difference(peers)

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks and their hosts, and says whether each is alive, silent or gone."""
        states = {
            "has died": self.dead,
            "has exited": self.exited,
            "silent: stopped, or its host or link is down": self.silent,
            "unknown: no heartbeat connection leads to it": frozenset(
                np.flatnonzero(~self.connected()).tolist()
            ),
            "alive: slower, at another step, or busy with something else": ranks,
        }
        texts = []
        for state, members in states.items():
            if group := ranks & members:
                texts.append(f"{name_ranks(group, self._describe)} ({state})")
                ranks -= group
        return "; ".join(texts) or "the other processes"

    def receive(self, rank: int, message: list[Any]) -> None:
        """Keeps the report of a peer. What is malformed is left out."""
        size = len(self._tree)
        match message:
            case [[*silent], [*dead], [*exited], [*rerouted], [*questions], [*answers]]:
                self._heard[rank] = report = Report(
                    decode_ranks(silent, size),
                    decode_ranks(dead, size),
                    decode_ranks(exited, size),
                    decode_ranks(rerouted, size),
                    tuple(decode_calls(questions)),
                    decode(answers, size),
                )
                self.dead |= report.dead
                self.exited |= report.exited

    def forget(self, rank: int) -> None:
        """Forgets the report of a peer that has died or exits."""
        self._heard.pop(rank, None)

    def repeat(self) -> None:
        """Sends reports again, also if they are the same as before."""
        self._sent.clear()

    def messages(
        self, parent: int | None, peers: Collection[int], silent_peers: frozenset[int]
    ) -> dict[int, list[Any]]:
        """The new messages for peers, by rank. The ``parent`` is one of them, or None."""
        self._parent = parent
        below = {rank: self._heard.get(rank, Report()) for rank in peers if rank != parent}
        # What a silent parent has said before is not passed on.
        above = None if parent is None or parent in silent_peers else self._heard.get(parent)
        # If the parent of a missing process has exited, it may have exited as well.
        lost = frozenset(rank for rank in self.missing if self._tree[rank] not in self.exited)
        silent = silent_peers.union(lost, *(report.silent for report in below.values()))
        # A process may report to another one than that which expects it.
        rerouted = self._own_rerouted.intersection(below)
        rerouted = rerouted.union(*(report.rerouted for report in below.values())) - silent_peers
        silent -= rerouted | (below.keys() - silent_peers)
        asked = self._roll_call.questions()
        asked += [call for report in below.values() for call in report.questions]
        questions = tuple(earliest(asked))
        answers = {
            call: merge(
                [self._roll_call.answer_to(call)]
                + [report.answers[call] for report in below.values() if call in report.answers]
            )
            for call in (above.questions if above else questions)
        }
        up = Report(silent - {parent}, self.dead, self.exited, rerouted, questions, answers)
        down = up._replace(silent=silent)
        if above:
            down = above._replace(dead=self.dead, exited=self.exited)
        self.silent, self._rerouted = down.silent | silent_peers, down.rerouted
        self._roll_call.answers = down.answers
        upwards, downwards = up.message(), down.message()
        messages = {rank: upwards if rank == parent else downwards for rank in peers}
        new = {rank: text for rank, text in messages.items() if self._sent.get(rank) != text}
        self._sent |= new
        return new
