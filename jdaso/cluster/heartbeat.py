"""Heartbeats between processes, which tell whether a process is dead, silent, or only slow.

Every process has a TCP connection to rank 0, over which a thread sends a heartbeat every second.
When a process dies, the kernel closes its connection, so all others learn of it at once. When a
process is stopped, or its host or network link is down, its connection is silent. A process that
is only slow still sends heartbeats. MPI reports none of this, and waits for a dead process forever.
"""

import contextlib
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection

from jdaso.cluster.addresses import addresses, listen
from jdaso.cluster.json_socket import MAX_MESSAGE_BYTES, JsonSocket
from jdaso.cluster.rendezvous import accept_peers, connect, new_secret
from jdaso.cluster.reports import Reports
from jdaso.cluster.roll_call import RollCall
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


class Heartbeat:
    """Sends heartbeats from this process and watches those of others, in one thread.

    Args:
        sockets: Connection to rank 0. In rank 0, the connections to all other ranks.
        abort: ``(reason, exit status)``. Called on every process when one has died, was silent for
            ten minutes, or has asked all to abort.
        unconnected: Ranks without a connection.
        parent: The rank to which this one reports. In the first process, its own rank.

    Attributes:
        roll_call: Which processes have posted an operation.
    """

    def __init__(
        self,
        rank: int,
        sockets: Collection[JsonSocket],
        describe: Callable[[int], str],
        abort: Callable[[str, int], None],
        unconnected: frozenset[int] = frozenset(),
        parent: int = 0,
    ):
        self._rank, self._parent, self._sockets = rank, parent, list(sockets)
        self._describe, self._abort = describe, abort
        self._on_death: list[Callable[[int], None]] = []
        self._tolerates_silence = False
        self._silent_peers: frozenset[int] = frozenset()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self.roll_call = RollCall(rank, self._wake)
        self._reports = Reports(rank, parent, describe, unconnected, self.roll_call)
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
        return not self._reports.unconnected

    def tolerate_deaths(self, on_death: Callable[[int], None], silence: bool) -> None:
        """From now on a death, and with ``silence`` a long silence, does not abort this process.

        A death calls ``on_death`` with the rank.
        """
        self._on_death.append(on_death)
        self._tolerates_silence |= silence

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
            if lost and not self._tolerates_silence:
                reason = (
                    f"{self._describe(peer.rank)} was silent for {LOST_SECONDS:.0f} s. Check "
                    f"whether it is stopped, or its host or network link is down, {_RESTART}"
                )
                self._abort_all(reason, EXIT_NODE_LOST, source=peer)

    def _report(self) -> None:
        """Sends a report to each peer that has not received the same one since the last beat."""
        ranks = [peer.rank for peer in self._sockets]
        messages = self._reports.messages(ranks, self._silent_peers)
        for peer in list(self._sockets):
            if peer.rank in messages:
                peer.send("beat", *messages[peer.rank])

    def _receive(self, peer: JsonSocket) -> None:
        for message in peer.read():
            match message:
                case ["beat", [*ranks], [*questions], [*answers]]:
                    self._reports.receive(peer.rank, ranks, questions, answers)
                case ["bye"]:
                    peer.exiting = True
                case ["end", str(reason), int(status)]:
                    self._abort_all(reason, status, source=peer)

    def _disconnected(self, peer: JsonSocket) -> None:
        self._sockets.remove(peer)
        self._reports.forget(peer.rank)
        self._silent_peers -= {peer.rank}
        if peer.rank == self._parent and self._on_death:
            # Without it, the states of all others are unknown.
            self._silent_peers |= {peer.rank}
            self._reports.silent = self._silent_peers
        if not peer.exiting and not self._closing:
            if not self._on_death:
                reason = (
                    f"{self._describe(peer.rank)} has died. Look for the cause in its output and "
                    f"in the log of its host, {_RESTART}"
                )
                self._abort_all(reason, EXIT_NODE_LOST, source=peer)
            else:
                self._reports.unconnected |= {peer.rank}
                for on_death in self._on_death:
                    on_death(peer.rank)
        peer.connection.close()

    def _abort_all(self, reason: str, status: int, source: JsonSocket) -> None:
        """Forwards the reason to all peers but its source, then aborts this process."""
        for peer in self._sockets:
            if peer is not source:
                peer.send("end", reason, status)
        self._abort(reason, status)


def start_heartbeat(
    comm: Comm, describe: Callable[[int], str], abort: Callable[[str, int], None]
) -> Heartbeat:
    """Connects all processes of a communicator, and starts their heartbeats; collective."""
    rank, others = comm.Get_rank(), set(range(1, comm.Get_size()))
    hosts, port, connections = ["no address"], 0, {}
    if rank == 0:
        if (listener := _listener(len(others))) is None:
            comm.bcast(None)
        else:
            hosts, port, secret = addresses(), listener.getsockname()[1], new_secret()
            comm.bcast((hosts, port, secret))
            # Some MPI libraries complete the broadcast only while they are being called.
            connections = accept_peers(listener, secret, others, _CONNECT_SECONDS, comm.Iprobe)
    elif (offer := comm.bcast(None)) is not None:
        hosts, port, secret = offer
        connection = connect(hosts, port, secret, rank, _CONNECT_SECONDS)
        connections = {} if connection is None else {0: connection}
    connected = comm.allgather(rank == 0 or bool(connections))
    unconnected = frozenset(
        r for r in range(len(connected)) if not (connected[rank] and connected[r])
    )
    if rank == 0 and unconnected:
        logger.warning(
            "no heartbeat from %s: they could not connect to %s at port %d of %s within %g s. If "
            "one of them dies, it is noticed only when an exchange times out. Allow TCP "
            "connections between the nodes in their firewalls.",
            *(", ".join(map(describe, sorted(unconnected))), describe(0), port),
            *(", ".join(hosts), _CONNECT_SECONDS),
        )
    sockets = [JsonSocket(s, r) for r, s in connections.items() if rank > 0 or r not in unconnected]
    return Heartbeat(rank, sockets, describe, abort, unconnected)


def _listener(connections: int) -> socket.socket | None:
    """A listening socket, with file descriptors for its connections; None without a network."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        wanted = soft + connections
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return listen(connections)
