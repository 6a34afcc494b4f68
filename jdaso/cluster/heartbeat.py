"""Heartbeats between processes, which tell whether a process is dead, silent, or only slow.

The processes are connected in a tree, see ``links``. A thread sends a heartbeat over each of a
process's TCP connections every second. When a process dies, the kernel closes its connections, and
the processes at their other ends tell all others at once. When a process is stopped, or its host or
network link is down, its connections are silent. A process that is only slow still sends
heartbeats. MPI reports none of this, and waits for a dead process forever.

A heartbeat carries a report: which processes are silent or dead, and who has not posted an
operation. Reports go up to the first process and down again. On the way up, each process merges
those of the processes that report to it, so a report does not grow with the number of processes.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jdaso.cluster.ending import EXIT_NODE_LOST, DeathPolicy
from jdaso.cluster.links import (
    CONNECT_SECONDS,
    MAX_MESSAGE_BYTES,
    NO_HEARTBEAT_ADVICE,
    JsonSocket,
    Links,
    connected,
    make_links,
    parents,
    without,
)
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.roll_call import (
    CALL,
    Answer,
    Call,
    RollCall,
    answers_shape,
    decode,
    decode_ranks,
    earliest,
    encode,
    encode_ranks,
    fits,
    merge,
    name_ranks,
    ranks_shape,
)
from jdaso.core.log import logger

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
# A process that has been silent for this long is presumed dead, and the job is aborted.
LOST_SECONDS = 600.0
_POLL_SECONDS = 0.01
_RESTART = "then start the job again from its last checkpoint."
_DIED = f"has died. Look for the cause in its output and in the log of its host, {_RESTART}"
_SILENT = (
    "was silent for {:.0f} s. Check whether it is stopped, or its host or network link is down, "
    f"{_RESTART}"
)


class Report(NamedTuple):
    """A message to a neighbor in the tree.

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
    """Keeps the last report of each peer, and tells what follows from them.

    Only the thread of the heartbeat changes it, once all connections are made. Each set is replaced
    as a whole, so that other threads may read it at any time.

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
        ranks = ranks_shape(len(tree))
        self._shape = (ranks, ranks, ranks, ranks, [CALL], answers_shape(len(tree)))
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
        """Returns for each rank whether its heartbeats arrive here, bool[P]."""
        top = {self._rank} if self._parent is None else set()
        cut = self.unconnected | top | (self.missing - self._rerouted)
        tree = without(self._tree, self.gone)
        return connected(tree, self._rank, cut, (self.silent | self.gone) - {self._rank})

    def not_among(self, peers: Collection[int]) -> frozenset[int]:
        """Returns the ranks that should report to this one after deaths, but are not peers."""
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
        """Keeps the report of a peer, unless it is malformed."""
        if not fits(message, self._shape):
            return
        *ranks, questions, answers = message
        silent, dead, exited, rerouted = map(decode_ranks, ranks)
        calls = tuple(Call(*call) for call in questions)
        self._heard[rank] = Report(silent, dead, exited, rerouted, calls, decode(answers))
        self.dead |= dead
        self.exited |= exited

    def forget(self, rank: int) -> None:
        """Forgets the report of a peer that has died or exits."""
        self._heard.pop(rank, None)

    def repeat(self) -> None:
        """Sends reports again, also if they are the same as before."""
        self._sent.clear()

    def messages(
        self, parent: int | None, peers: Collection[int], silent_peers: frozenset[int]
    ) -> dict[int, list[Any]]:
        """Returns the new messages for peers, by rank. The ``parent`` is one of them, or None."""
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
        asked = list(self._roll_call.asked)
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


class Heartbeat:
    """Sends heartbeats from this process and watches those of others, in one thread.

    Args:
        tree: The rank to which each rank reports; rank 0 reports to itself.
        links: The connections to the parent of this rank, and to the ranks that report to it.
        abort: ``(reason, exit status)``. Called on every process when one has died, was silent for
            ten minutes, or has asked all to abort.

    Attributes:
        describe: Names a rank and its host.
        roll_call: Which processes have posted an operation.
    """

    def __init__(
        self,
        rank: int,
        tree: np.ndarray,
        links: Links,
        describe: Callable[[int], str],
        abort: Callable[[str, int], None],
    ):
        self._links, self.describe, self._abort = links, describe, abort
        self._policies: list[DeathPolicy] = []
        self._dead: frozenset[int] = frozenset()
        self._exited: frozenset[int] = frozenset()
        self._silent_peers: frozenset[int] = frozenset()
        self._expected: dict[int, float] = {}  # ranks that have not connected, since when
        self.roll_call = RollCall(rank, links.wake)
        self._reports = Reports(rank, tree, describe, self.roll_call)
        os.register_at_fork(after_in_child=links.close)
        threading.Thread(target=self._run, name="jdaso-heartbeat", daemon=True).start()

    def silent_ranks(self) -> frozenset[int]:
        """Returns the ranks from which nothing was received for ``SILENT_SECONDS``."""
        return self._reports.silent

    def exited_ranks(self) -> frozenset[int]:
        """Returns the ranks that have announced that they exit normally."""
        return self._reports.exited

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks and their hosts, and says whether each is alive, silent or gone."""
        return self._reports.states(ranks)

    def broadcast_abort(self, reason: str, status: int, source: int | None = None) -> bool:
        """Asks all other processes but the source of the reason to abort for the same reason.

        Returns whether a connection leads to every one of them.
        """
        for peer in list(self._links.peers):
            if peer.rank != source:
                peer.send("end", reason[-MAX_MESSAGE_BYTES // 16 :], status)
        return bool(self._reports.connected().all())

    def follow(self, policy: DeathPolicy) -> Callable[[], None]:
        """Lets a policy say which deaths and long silences the job survives.

        Without one, and for a rank that one of several policies needs, all processes abort. Those
        that reported to a dead process report to another one. The result ends this.
        """
        self._policies.append(policy)
        self._dead = frozenset()  # tells again of deaths that were known before
        return functools.partial(self._policies.remove, policy)

    def close(self) -> None:
        """Announces that this process exits normally."""
        exited = encode_ranks(self._exited | self.exited_ranks())
        self._links.say_bye(exited[: MAX_MESSAGE_BYTES // 64])

    def _tolerates(self, rank: int) -> bool:
        handled = any(policy.on_death for policy in list(self._policies))
        return handled and not self._needs(rank)

    def _needs(self, rank: int) -> bool:
        return any(rank in policy.needed for policy in list(self._policies))

    def _run(self) -> None:
        next_beat, links = time.monotonic(), self._links
        while links.in_use:
            for peer in links.wait(max(0.0, next_beat - time.monotonic()), self._reports.gone):
                self._receive(peer)
                if peer.closed:
                    self._disconnected(peer)
            now = time.monotonic()
            if now >= next_beat:
                # If this process itself was paused, it cannot know which peers were silent.
                if now - next_beat > SILENT_SECONDS - BEAT_SECONDS:
                    for peer in links.peers:
                        peer.last_received = now
                next_beat = now + BEAT_SECONDS
                self._check_silence(now)
                # Most jobs end on all processes at the same time, and need no reports of that.
                self._reports.exited |= self._exited
                links.search(self._reports.gone)
                self._reports.repeat()
            self._report()

    def _check_silence(self, now: float) -> None:
        """Updates the silent peers, and aborts if one is lost."""
        missing = self._reports.not_among([peer.rank for peer in self._links.peers])
        self._expected = {rank: self._expected.get(rank, now) for rank in missing}
        self._reports.missing = frozenset(
            rank for rank, since in self._expected.items() if now - since > SILENT_SECONDS
        )
        self._silent_peers = frozenset(
            peer.rank
            for peer in self._links.peers
            if not peer.exiting and now - peer.last_received > SILENT_SECONDS
        )
        for peer in self._links.peers:
            lost = peer.rank in self._silent_peers and now - peer.last_received > LOST_SECONDS
            if lost and not self._tolerates(peer.rank):
                self._abort_without(peer.rank, _SILENT.format(LOST_SECONDS))

    def _report(self) -> None:
        """Sends a report to each peer that has not received the same one since the last beat."""
        links = self._links
        peers = {p.rank: p for p in links.peers if not (p.exiting or links.closing)}
        parent = links.parent.rank if links.parent else None
        messages = self._reports.messages(parent, list(peers), self._silent_peers)
        for rank, message in messages.items():
            peers[rank].send("beat", *message)
        died, self._dead = self._reports.dead - self._dead, self._reports.dead
        for rank in sorted(died):
            if self._needs(rank):  # the process that has noticed the death does not
                self._abort_without(rank, _DIED)
            for policy in list(self._policies):
                if policy.on_death is not None:
                    policy.on_death(rank)

    def _receive(self, peer: JsonSocket) -> None:
        for message in peer.read():
            match message:
                case ["beat", *report] if not peer.exiting:
                    self._reports.receive(peer.rank, report)
                case ["bye", *exited]:
                    peer.exiting = True
                    self._exited |= {peer.rank}
                    if fits(exited, ranks_shape(self._links.size)):
                        self._exited |= decode_ranks(exited)
                    self._reports.forget(peer.rank)
                case ["end", str(reason), status] if fits(status, range(256)):
                    self._abort_all(reason, status, source=peer.rank)

    def _disconnected(self, peer: JsonSocket) -> None:
        self._links.remove(peer)
        self._silent_peers -= {peer.rank}
        self._reports.forget(peer.rank)
        # A process that has not sent its first message has not accepted the connection. It need not
        # be dead, and this process searches again.
        refused = peer.rank < self._links.rank and not peer.heard
        if peer.exiting or refused or self._links.closing:
            return
        if self._tolerates(peer.rank):
            self._reports.dead |= {peer.rank}
        else:
            self._abort_without(peer.rank, _DIED)

    def _abort_without(self, rank: int, reason: str) -> None:
        self._abort_all(f"{self.describe(rank)} {reason}", EXIT_NODE_LOST, source=rank)

    def _abort_all(self, reason: str, status: int, source: int) -> None:
        self.broadcast_abort(reason, status, source)
        self._abort(reason, status)


def start_heartbeat(
    comm: Comm,
    memory_groups: np.ndarray,
    describe: Callable[[int], str],
    abort: Callable[[str, int], None],
) -> Heartbeat:
    """Connects the processes of a communicator, and starts their heartbeats; collective."""
    rank, tree = comm.Get_rank(), parents(memory_groups)
    links = make_links(comm, tree, describe(rank))
    heartbeat = Heartbeat(rank, tree, links, describe, abort)
    while not links.settled.wait(_POLL_SECONDS):
        comm.Iprobe()  # some MPI libraries send only while they are being called
    connects = comm.allgather(rank == 0 or links.parent is not None)
    unconnected = frozenset(other for other, found in enumerate(connects) if not found)
    heartbeat._reports.unconnected = unconnected
    if rank == min(unconnected, default=None):
        parent, hosts, port, _ = links.contacts[0]
        logger.warning(
            "no heartbeat from %s: %s could not connect to %s at port %d of %s within %g s. %s",
            *(name_ranks(unconnected, describe), describe(rank), describe(parent), port),
            *(", ".join(hosts) or "no address", CONNECT_SECONDS, NO_HEARTBEAT_ADVICE),
        )
    return heartbeat
