"""Heartbeats between processes, which tell whether a process is dead, silent, or only slow.

The processes are connected in a tree, see ``heartbeat_tree``. A thread sends a heartbeat over each
of a process's TCP connections every second. When a process dies, the kernel closes its connections,
and the processes at their other ends tell all others at once. When a process is stopped, or its
host or network link is down, its connections are silent. A process that is only slow still sends
heartbeats. MPI reports none of this, and waits for a dead process forever.
"""

import os
import threading
import time
from collections.abc import Callable

import numpy as np

from jdaso.cluster.heartbeat_tree import parents
from jdaso.cluster.json_socket import MAX_MESSAGE_BYTES, JsonSocket
from jdaso.cluster.links import CONNECT_SECONDS, NO_HEARTBEAT_ADVICE, Links, make_links
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.ranks import decode_ranks, is_number, name_ranks
from jdaso.cluster.reports import Reports
from jdaso.cluster.roll_call import RollCall
from jdaso.core.log import logger

#: Exit status when a process has died or was silent for too long: EX_UNAVAILABLE of sysexits.h.
EXIT_NODE_LOST = 69
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


class Heartbeat:
    """Sends heartbeats from this process and watches those of others, in one thread.

    Args:
        tree: The rank to which each rank reports; rank 0 reports to itself.
        links: The connections to the parent of this rank, and to the ranks that report to it.
        abort: ``(reason, exit status)``. Called on every process when one has died, was silent for
            ten minutes, or has asked all to abort.

    Attributes:
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
        self._links, self._describe, self._abort = links, describe, abort
        self._on_death: list[Callable[[int], None]] = []
        self._needed: frozenset[int] = frozenset()
        self._dead: frozenset[int] = frozenset()
        self._exited: frozenset[int] = frozenset()
        self._silent_peers: frozenset[int] = frozenset()
        self._expected: dict[int, float] = {}  # ranks that have not connected, since when
        self.roll_call = RollCall(rank, links.wake)
        self._reports = Reports(rank, tree, describe, self.roll_call)
        os.register_at_fork(after_in_child=links.close)
        threading.Thread(target=self._run, name="jdaso-heartbeat", daemon=True).start()

    def set_unconnected(self, ranks: frozenset[int]) -> None:
        """Notes which ranks could not connect to their parents at the start."""
        self._reports.unconnected = ranks

    def silent_ranks(self) -> frozenset[int]:
        """The ranks from which nothing was received for ``SILENT_SECONDS``."""
        return self._reports.silent

    def exited_ranks(self) -> frozenset[int]:
        """The ranks that have announced that they exit normally."""
        return self._reports.exited

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks and their hosts, and says whether each is alive, silent or gone."""
        return self._reports.states(ranks)

    def broadcast_abort(self, reason: str, status: int) -> bool:
        """Asks all other processes to abort for the same reason; whether all are connected."""
        for peer in list(self._links.peers):
            peer.send("end", reason[-MAX_MESSAGE_BYTES // 16 :], status)
        return bool(self._reports.connected().all())

    def tolerate_deaths(
        self, on_death: Callable[[int], None], needed: frozenset[int] = frozenset()
    ) -> None:
        """From now on neither a death nor a long silence aborts the job.

        All processes must call it. A death calls ``on_death`` with the rank. The death of a rank
        in ``needed`` still aborts all that learn of it. Those that reported to a dead process
        report to another one from then on.
        """
        self._on_death.append(on_death)
        self._needed |= needed
        self._dead = frozenset()  # tells again of deaths that were known before

    def close(self) -> None:
        """Announces that this process exits normally."""
        self._links.say_bye(self._exited | self.exited_ranks())

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
            if lost and (not self._on_death or peer.rank in self._needed):
                reason = f"{self._describe(peer.rank)} {_SILENT.format(LOST_SECONDS)}"
                self._abort_all(reason, EXIT_NODE_LOST, source=peer)

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
            for on_death in self._on_death:
                on_death(rank)

    def _receive(self, peer: JsonSocket) -> None:
        for message in peer.read():
            match message:
                case ["beat", *report] if not peer.exiting:
                    self._reports.receive(peer.rank, report)
                case ["bye", *exited]:
                    peer.exiting = True
                    self._exited |= {peer.rank} | decode_ranks(exited, self._links.size)
                    self._reports.forget(peer.rank)
                case ["end", str(reason), status] if is_number(status, 256):
                    self._abort_all(reason, status, source=peer)

    def _disconnected(self, peer: JsonSocket) -> None:
        self._links.remove(peer)
        self._silent_peers -= {peer.rank}
        self._reports.forget(peer.rank)
        # A process that has not sent its first message has not accepted the connection. It need not
        # be dead, and this process searches again.
        refused = peer.rank < self._links.rank and not peer.heard
        if peer.exiting or refused or self._links.closing:
            return
        if self._on_death and peer.rank not in self._needed:
            self._reports.dead |= {peer.rank}
        else:
            self._abort_all(f"{self._describe(peer.rank)} {_DIED}", EXIT_NODE_LOST, source=peer)

    def _abort_all(self, reason: str, status: int, source: JsonSocket) -> None:
        """Forwards the reason to all peers but its source, then aborts this process."""
        for peer in self._links.peers:
            if peer is not source:
                peer.send("end", reason, status)
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
    connects = np.empty(len(tree), bool)
    comm.Allgather(np.array([rank == 0 or links.parent is not None]), connects)
    unconnected = frozenset(np.flatnonzero(~connects).tolist())
    heartbeat.set_unconnected(unconnected)
    if rank == min(unconnected, default=None):
        parent, hosts, port, _ = links.contacts[0]
        logger.warning(
            "no heartbeat from %s: %s could not connect to %s at port %d of %s within %g s. %s",
            *(name_ranks(unconnected, describe), describe(rank), describe(parent), port),
            *(", ".join(hosts) or "no address", CONNECT_SECONDS, NO_HEARTBEAT_ADVICE),
        )
    return heartbeat
