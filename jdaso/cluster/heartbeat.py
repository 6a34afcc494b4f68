"""Heartbeats between processes, which tell whether a process is dead, silent, or only slow.

The processes are connected in a tree, see ``tree``. A thread sends a heartbeat over each of a
process's TCP connections every second. When a process dies, the kernel closes its connections, and
the processes at their other ends tell all others at once. When a process is stopped, or its host or
network link is down, its connections are silent. A process that is only slow still sends
heartbeats. MPI reports none of this, and waits for a dead process forever.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jdaso.cluster.addresses import addresses, listen
from jdaso.cluster.json_socket import MAX_MESSAGE_BYTES, JsonSocket
from jdaso.cluster.rendezvous import accept_peers, connect, new_secret
from jdaso.cluster.reports import Reports
from jdaso.cluster.roll_call import MAX_NAMES, RollCall
from jdaso.cluster.tree import parents
from jdaso.core.log import logger
from jdaso.core.mpi_types import Comm

#: Exit status when a process has died or was silent for too long: EX_UNAVAILABLE of sysexits.h.
EXIT_NODE_LOST = 69
BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0
# A process that has been silent for this long is presumed dead, and the job is aborted.
LOST_SECONDS = 600.0
_CONNECT_SECONDS = 20.0
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
        sockets: Connections to the parent of this rank, and to the ranks that report to it.
        abort: ``(reason, exit status)``. Called on every process when one has died, was silent for
            ten minutes, or has asked all to abort.
        unconnected: Ranks without a connection to their parents.

    Attributes:
        roll_call: Which processes have posted an operation.
    """

    def __init__(
        self,
        rank: int,
        tree: np.ndarray,
        sockets: Collection[JsonSocket],
        describe: Callable[[int], str],
        abort: Callable[[str, int], None],
        unconnected: frozenset[int] = frozenset(),
    ):
        self._sockets, self._describe, self._abort = list(sockets), describe, abort
        self._on_death: list[Callable[[int], None]] = []
        self._tolerates_silence = False
        self._needed: frozenset[int] = frozenset()
        self._dead: frozenset[int] = frozenset()
        self._silent_peers: frozenset[int] = frozenset()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self.roll_call = RollCall(rank, self._wake)
        self._reports = Reports(rank, tree, describe, unconnected, self.roll_call)
        self._closing = False
        os.register_at_fork(after_in_child=self._close_in_child)
        threading.Thread(target=self._run, name="jdaso-heartbeat", daemon=True).start()

    def silent_ranks(self) -> frozenset[int]:
        """The ranks from which nothing was received for ``SILENT_SECONDS``."""
        return self._reports.silent

    def states(self, ranks: frozenset[int]) -> str:
        """Names ranks and their hosts, and says whether each is alive or silent."""
        return self._reports.states(ranks)

    def broadcast_abort(self, reason: str, status: int) -> bool:
        """Asks all other processes to abort for the same reason; whether all are connected."""
        for peer in list(self._sockets):
            peer.send("end", reason[-MAX_MESSAGE_BYTES // 16 :], status)
        return bool(self._reports.connected().all())

    def tolerate_deaths(
        self,
        on_death: Callable[[int], None],
        silence: bool,
        needed: frozenset[int] = frozenset(),
    ) -> None:
        """From now on a death, and with ``silence`` a long silence, does not abort the job.

        All processes must call it. A death calls ``on_death`` with the rank. The death of a rank
        in ``needed`` still aborts all that learn of it. Those that reported to a dead process hear
        only of each other from then on.
        """
        self._on_death.append(on_death)
        self._tolerates_silence |= silence
        self._needed |= needed
        self._dead = frozenset()  # tells again of deaths that were known before

    def close(self) -> None:
        """Announces that this process exits normally."""
        self._closing = True
        for peer in list(self._sockets):
            peer.send("bye")

    def _close_in_child(self) -> None:
        """Closes the sockets in a forked child, so that the parent's death closes the last copy."""
        for peer in self._sockets:
            peer.connection.close()
        self._sockets.clear()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it will wake anyway, or has ended
            self._wake_writer.send(b"?")

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_reader, selectors.EVENT_READ)
        for peer in self._sockets:
            selector.register(peer.connection, selectors.EVENT_READ, peer)
        next_beat = time.monotonic()
        while self._sockets:
            for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                if key.data is None:
                    self._wake_reader.recv(1024)
                    continue
                self._receive(key.data)
                if key.data.closed:
                    selector.unregister(key.data.connection)
                    self._disconnected(key.data)
            now = time.monotonic()
            if now >= next_beat:
                # If this process itself was paused, it cannot know which peers were silent.
                if now - next_beat > SILENT_SECONDS - BEAT_SECONDS:
                    for peer in self._sockets:
                        peer.last_received = now
                next_beat = now + BEAT_SECONDS
                self._check_silence(now)
                self._reports.repeat()
            self._report()

    def _check_silence(self, now: float) -> None:
        """Updates the silent peers, and aborts if one is lost."""
        self._silent_peers = frozenset(
            peer.rank
            for peer in self._sockets
            if not peer.exiting and now - peer.last_received > SILENT_SECONDS
        )
        for peer in self._sockets:
            lost = peer.rank in self._silent_peers and now - peer.last_received > LOST_SECONDS
            if lost and (not self._tolerates_silence or peer.rank in self._needed):
                reason = f"{self._describe(peer.rank)} {_SILENT.format(LOST_SECONDS)}"
                self._abort_all(reason, EXIT_NODE_LOST, source=peer)

    def _report(self) -> None:
        """Sends a report to each peer that has not received the same one since the last beat."""
        messages = self._reports.messages([p.rank for p in self._sockets], self._silent_peers)
        for peer in list(self._sockets):
            if peer.rank in messages:
                peer.send("beat", *messages[peer.rank])
        died, self._dead = self._reports.dead - self._dead, self._reports.dead
        for rank in sorted(died):
            for on_death in self._on_death:
                on_death(rank)

    def _receive(self, peer: JsonSocket) -> None:
        for message in peer.read():
            match message:
                case ["beat", [*silent], [*dead], [*questions], [*answers]]:
                    self._reports.receive(peer.rank, silent, dead, questions, answers)
                case ["bye"]:
                    peer.exiting = True
                case ["end", str(reason), int(status)]:
                    self._abort_all(reason, status, source=peer)

    def _disconnected(self, peer: JsonSocket) -> None:
        self._sockets.remove(peer)
        self._silent_peers -= {peer.rank}
        self._reports.disconnect(peer.rank)
        if not peer.exiting and not self._closing:
            if self._on_death and peer.rank not in self._needed:
                self._reports.dead |= {peer.rank}
            else:
                reason = f"{self._describe(peer.rank)} {_DIED}"
                self._abort_all(reason, EXIT_NODE_LOST, source=peer)
        peer.connection.close()

    def _abort_all(self, reason: str, status: int, source: JsonSocket) -> None:
        """Forwards the reason to all peers but its source, then aborts this process."""
        for peer in self._sockets:
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
    parent, below = int(tree[rank]), set(np.flatnonzero(tree == rank).tolist()) - {rank}
    listener, secret = listen(len(below)) if below else None, new_secret()
    own = (addresses(), listener.getsockname()[1], secret) if listener else ([], 0, secret)
    sends = [comm.isend(own, dest=child) for child in below]
    hosts, port, code = comm.recv(source=parent) if rank else ([], 0, secret)
    connections: dict[int, socket.socket] = {}
    with ThreadPoolExecutor(1) as pool:  # the own parent may answer later than the others connect
        above = pool.submit(connect, hosts, port, code, rank, _CONNECT_SECONDS) if hosts else None
        if listener is not None:
            # Some MPI libraries complete sends only while they are being called.
            connections = accept_peers(listener, secret, below, _CONNECT_SECONDS, comm.Iprobe)
    if above is not None and (connection := above.result()) is not None:
        connections[parent] = connection
    for send in sends:
        send.wait()
    connects = np.empty(len(tree), bool)
    comm.Allgather(np.array([rank == 0 or parent in connections]), connects)
    unconnected = frozenset(np.flatnonzero(~connects).tolist())
    if rank == min(unconnected, default=None):
        names = [*map(describe, sorted(unconnected)[:MAX_NAMES])]
        names += [f"{len(unconnected) - MAX_NAMES} more"] * (len(unconnected) > MAX_NAMES)
        logger.warning(
            "no heartbeat from %s: %s could not connect to %s at port %d of %s within %g s. If "
            "one of them dies, it is noticed only when an exchange times out. Allow TCP "
            "connections between the nodes in their firewalls.",
            *(", ".join(names), describe(rank), describe(parent), port),
            *(", ".join(hosts) or "no address", _CONNECT_SECONDS),
        )
    sockets = [JsonSocket(s, r) for r, s in connections.items() if r not in unconnected - {parent}]
    return Heartbeat(rank, tree, sockets, describe, abort, unconnected)
