"""Connections in the tree of heartbeats, which find another way when a process has died or exited.

Each process listens at a port. At the start it learns the ports of all processes to which it may
report later. These have lower ranks, so the connections form no cycle.
"""

import contextlib
import math
import queue
import selectors
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from jdaso.cluster.addresses import addresses, listen
from jdaso.cluster.heartbeat_tree import GROUP, ancestors
from jdaso.cluster.json_socket import MAX_MESSAGE_BYTES, JsonSocket
from jdaso.cluster.mpi_types import Comm
from jdaso.cluster.ranks import encode_ranks
from jdaso.cluster.rendezvous import Acceptor, Secret, connect, new_secret
from jdaso.core.log import logger

# Seconds for the whole search for a process to report to, and for one attempt if there are several
# candidates.
CONNECT_SECONDS, _TRY_SECONDS = 20.0, 0.2
# A process whose ancestors are all gone reports to a rank below this number.
_FIRST_RANKS = 2 * GROUP
_BACKLOG = 4 * GROUP
_CONTACT = np.dtype([("port", "<i4"), ("hosts", "S256")])
#: What a missing heartbeat means, and what to do.
NO_HEARTBEAT_ADVICE = (
    "A death may then be noticed only when an exchange times out. Allow TCP connections between "
    "the nodes in their firewalls."
)


class Contact(NamedTuple):
    """Where a process listens."""

    rank: int
    hosts: list[str]
    port: int
    secret: Secret


class Links:
    """The connections of a process: to the one that it reports to, and to those that report to it.

    Args:
        size: Number of processes.
        name: Rank and host of this process.
        peers: Connections that exist already.
        contacts: The processes to which this one may report, first its parent in the tree.
        acceptor: Accepts processes that report to this one.

    Attributes:
        rank: Of this process.
        size: Number of processes.
        peers: The connections. That to the process that this one reports to has a lower rank.
        settled: Set when the parent in the tree is connected, or does not answer.
        closing: Whether this process exits.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        name: str,
        peers: Sequence[JsonSocket] = (),
        contacts: Sequence[Contact] = (),
        acceptor: Acceptor | None = None,
    ):
        self.rank, self.size, self._name = rank, size, name
        self.contacts, self._acceptor = contacts, acceptor
        self._found: queue.SimpleQueue[JsonSocket | None] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        if acceptor is not None:
            self._selector.register(acceptor, selectors.EVENT_READ, acceptor)
        self.peers: list[JsonSocket] = []
        self.closing = self._searching = False
        for peer in peers:
            self._add(peer)
        self.settled = threading.Event()
        self._orphan_since, self._gives_up = math.inf, False
        if contacts:
            self._start_search(contacts[:1], CONNECT_SECONDS)
        else:
            self.settled.set()

    @property
    def parent(self) -> JsonSocket | None:
        """The process that this one reports to."""
        return next((p for p in self.peers if p.rank < self.rank and not p.exiting), None)

    @property
    def in_use(self) -> bool:
        """Whether there are peers, or may be later."""
        return bool(self.peers) or self._acceptor is not None or not self.settled.is_set()

    def wake(self) -> None:
        """Ends a call of ``wait``; called by any thread."""
        with contextlib.suppress(OSError):  # it will end anyway, or this process exits
            self._wake_writer.send(b"?")

    def wait(self, seconds: float, gone: Collection[int]) -> list[JsonSocket]:
        """Waits at most some seconds for messages; returns the peers that have sent some.

        It accepts connections, but not from ranks that are ``gone``.
        """
        known, senders = {*gone, *(peer.rank for peer in self.peers)}, []

        def allows(rank: int) -> bool:
            return self.rank < rank < self.size and rank not in known and not self.closing

        for key, _ in self._selector.select(seconds):
            match key.data:
                case JsonSocket():
                    senders.append(key.data)
                case None:
                    self._wake_reader.recv(1024)
                    while not self._found.empty():
                        self._end_search(self._found.get())
        if self._acceptor is not None:
            for rank, connection in self._acceptor.accept(allows).items():
                self._add(JsonSocket(connection, rank))
        return senders

    def remove(self, peer: JsonSocket) -> None:
        """Closes the connection to a peer."""
        self._selector.unregister(peer.connection)
        self.peers.remove(peer)
        peer.connection.close()

    def search(self, gone: Collection[int]) -> None:
        """Starts to search for a process to report to, if there is none, among those not gone."""
        contacts = [c for c in self.contacts if c.rank not in gone]
        if contacts and not (self.parent or self._searching or self.closing or self._gives_up):
            self._orphan_since = min(self._orphan_since, time.monotonic())
            self._start_search(contacts, _TRY_SECONDS)

    def say_bye(self, exited: Collection[int]) -> None:
        """Tells all peers that this process exits, and which have before; called by any thread."""
        ranks = encode_ranks(exited)[: MAX_MESSAGE_BYTES // 64]
        self.closing = True
        if self._acceptor is not None:
            self._acceptor.refuse()
        for peer in list(self.peers):
            peer.send("bye", *ranks)

    def close(self) -> None:
        """Closes all sockets, in a forked child."""
        while self.peers:
            self.peers.pop().connection.close()
        if self._acceptor is not None:
            self._acceptor.close()

    def _add(self, peer: JsonSocket) -> None:
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self.peers.append(peer)
        peer.send("bye" if self.closing else "here")  # the first message completes a connection

    def _start_search(self, contacts: Sequence[Contact], each: float) -> None:
        """Connects to the first contact that answers, in a thread that tries each some seconds."""

        def search() -> None:
            found = None
            try:
                for rank, hosts, port, secret in contacts:
                    if hosts and (connection := connect(hosts, port, secret, self.rank, each)):
                        found = JsonSocket(connection, rank)
                        break
            finally:
                self._found.put(found)
                self.wake()

        thread = threading.Thread(target=search, name="jdaso-links", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the limit of threads is reached, and the next beat tries again
            self.settled.set()
        else:
            self._searching = True

    def _end_search(self, found: JsonSocket | None) -> None:
        self._searching = False
        if found is not None:
            self._add(found)
            self._orphan_since = math.inf
        elif not self.settled.is_set():
            self._gives_up = True
        elif time.monotonic() - self._orphan_since > CONNECT_SECONDS and not self.closing:
            self._gives_up = True
            logger.warning(
                "%s has no heartbeat: the process to which it reported has died or exited, and no "
                "other one answered within %g s. %s",
                *(self._name, CONNECT_SECONDS, NO_HEARTBEAT_ADVICE),
            )
        self.settled.set()


def make_links(comm: Comm, tree: np.ndarray, name: str) -> Links:
    """Starts to connect a process to its parent in the tree, and to accept others; collective."""
    rank, listener, secret = comm.Get_rank(), listen(_BACKLOG), comm.bcast(new_secret())
    hosts = addresses() if listener is not None else []
    while len(" ".join(hosts)) > _CONTACT["hosts"].itemsize:
        hosts.pop()
    port = listener.getsockname()[1] if listener is not None else 0
    own = np.array([(port, " ".join(hosts).encode())], _CONTACT)
    records = np.empty(len(tree), _CONTACT)
    comm.Allgather(own.view(np.uint8), records.view(np.uint8))
    ranks = dict.fromkeys([*ancestors(tree, rank), *range(min(rank, _FIRST_RANKS))])
    places = ((r, *records[r].item()) for r in ranks)
    contacts = [Contact(r, hosts.decode().split(), port, secret) for r, port, hosts in places]
    acceptor = Acceptor(listener, secret) if listener is not None else None
    return Links(rank, len(tree), name, [], contacts, acceptor)
