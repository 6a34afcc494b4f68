"""The TCP connections of the heartbeat: a tree of processes, which mends itself after deaths.

Each process listens at a port. At the start it learns the ports of all processes to which it may
report later. These have lower ranks, so the connections form no cycle. Both sides prove that they
know the secret of the job, which is never sent. What travels are lines of JSON.
"""

import contextlib
import hmac
import ipaddress
import json
import math
import queue
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jdaso.cluster.mpi_types import Comm
from jdaso.core.log import logger

# The most processes of its own host that report to one process, and the most first processes of
# other hosts that do.
GROUP = 32
# A process whose ancestors are all gone reports to a rank below this number.
_FIRST_RANKS = 2 * GROUP
_BACKLOG = 4 * GROUP
# Seconds for the whole search for a process to report to, and for one attempt if there are several
# candidates.
CONNECT_SECONDS, _TRY_SECONDS = 20.0, 0.2
_CONNECT_SECONDS, _REPLY_SECONDS, _PAUSE_SECONDS = 1.0, 5.0, 0.1
_FIRST_REPLY_SECONDS = 1.0  # doubled with each attempt, because a stranger may have the address
_CHALLENGE_BYTES, _PROOF_BYTES = 16, 32
_REQUEST = struct.Struct(f">{_CHALLENGE_BYTES}sI")  # challenge, rank
_FIRST_BYTE = b"\n"  # of every message
# Connections of an Acceptor that are not complete.
_MOST_PENDING = 256
# A longer line is not a message of this protocol.
MAX_MESSAGE_BYTES = 1 << 16
# Linux lists the addresses of its interfaces here.
_IPV4_TABLE, _IPV6_TABLE = Path("/proc/net/fib_trie"), Path("/proc/net/if_inet6")
#: What a missing heartbeat means, and what to do.
NO_HEARTBEAT_ADVICE = (
    "A death may then be noticed only when an exchange times out. Allow TCP connections between "
    "the nodes in their firewalls."
)


def parents(memory_groups: np.ndarray) -> np.ndarray:
    """Returns the rank to which each rank reports, which is lower. Rank 0 reports to itself.

    The first process of each host reports to that of another host, and the others within their
    host. No process has more than ``2 GROUP`` others that report to it.

    Args:
        memory_groups: For each rank, the smallest rank of its host, int[P].

    >>> parents(np.array([0, 0, 0, 3, 3, 5]))
    array([0, 0, 0, 0, 3, 0])
    """
    first_ranks, hosts = np.unique(memory_groups, return_inverse=True)
    order = np.argsort(hosts, kind="stable")  # all ranks, host by host
    first_places = np.searchsorted(hosts[order], np.arange(len(first_ranks)))
    local = np.argsort(order) - first_places[hosts]  # index within its host
    within = order[first_places[hosts] + np.maximum(local - 1, 0) // GROUP]
    between = first_ranks[np.maximum(hosts - 1, 0) // GROUP]
    return np.where(local > 0, within, between)


def ancestors(tree: np.ndarray, rank: int) -> list[int]:
    """Returns the ranks above a rank, the nearest first.

    >>> ancestors(np.array([0, 0, 1, 2]), 3)
    [2, 1, 0]
    """
    above: list[int] = []
    while (parent := int(tree[rank])) != rank:
        above, rank = [*above, parent], parent
    return above


def without(tree: np.ndarray, gone: Collection[int]) -> np.ndarray:
    """Returns the tree in which no rank reports to one of ``gone``.

    A rank that reported to one of them reports to its nearest remaining ancestor, or, if there is
    none, to the lowest remaining rank.

    >>> without(np.array([0, 0, 1, 1, 0]), [1]), without(np.array([0, 0, 1, 1, 0]), [0])
    (array([0, 0, 0, 0, 0]), array([1, 1, 1, 1, 1]))
    """
    ranks, lost = np.arange(len(tree)), np.isin(np.arange(len(tree)), [*gone])
    tree = np.where(lost & (tree == ranks), np.argmin(lost), tree)
    while lost[tree].any():
        tree = np.where(lost[tree], tree[tree], tree)
    return tree


def connected(
    tree: np.ndarray, rank: int, unconnected: Collection[int], gone: Collection[int]
) -> np.ndarray:
    """Returns for each rank whether messages travel between it and ``rank``, bool[P].

    Args:
        tree: The result of :func:`parents`.
        unconnected: Ranks without a connection to their parents.
        gone: Ranks that neither send nor forward messages.

    >>> connected(np.array([0, 0, 0, 1, 3]), 0, unconnected=[], gone=[3])
    array([ True,  True,  True, False, False])
    """
    cut = np.isin(tree, list(gone))
    cut[[*unconnected, *gone]] = True
    top = np.where(cut, np.arange(len(tree)), tree)
    while (top[top] != top).any():
        top = top[top]
    return top == top[rank]


def addresses() -> list[str]:
    """Returns the IPv4 and IPv6 addresses of this host, loopback addresses last.

    They are those of its interfaces and of its host name. Link-local addresses are left out,
    because they are valid with the name of an interface of the other host only.

    >>> "127.0.0.1" in addresses()
    True
    """
    found: list[str] = []
    with contextlib.suppress(OSError):  # no IPv4
        found += re.findall(r"\|-- (\S+)\n +/32 host LOCAL", _IPV4_TABLE.read_text())
    with contextlib.suppress(OSError, ValueError):  # no IPv6
        lines = _IPV6_TABLE.read_text().splitlines()
        found += [str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))) for line in lines]
    with contextlib.suppress(OSError):
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)]
    parsed = [ipaddress.ip_address(text.partition("%")[0]) for text in [*found, "127.0.0.1", "::1"]]
    usable = [address for address in dict.fromkeys(parsed) if not address.is_link_local]
    usable.sort(key=lambda address: (address.is_loopback, address.version))
    return [str(address) for address in usable]


def listen() -> socket.socket | None:
    """Returns a socket that listens at all addresses of this host, or None without a network."""
    for family, both in ((socket.AF_INET6, True), (socket.AF_INET, False)):
        with contextlib.suppress(OSError, ValueError):  # this host has no IPv6
            return socket.create_server(
                ("", 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both
            )
    return None


def secret_of(secret: bytes, rank: int) -> bytes:
    """The secret by which peers know the listener of a rank."""
    return _proof(secret, b"rank", str(rank).encode())


def _proof(secret: bytes, of: bytes, challenges: bytes) -> bytes:
    return hmac.digest(secret, of + challenges, "sha256")


class Acceptor:
    """Accepts connections to a listening socket. A selector can wait for it.

    Args:
        listener: The socket. It belongs to this object.
        secret: What peers must know.
    """

    def __init__(self, listener: socket.socket, secret: bytes):
        self._listener, self._secret = listener, secret
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._allows: Callable[[int], bool]

    def fileno(self) -> int:
        return self._selector.fileno()

    def accept(self, allows: Callable[[int], bool]) -> dict[int, socket.socket]:
        """Returns the connections that have become complete, by rank.

        The first message of a peer after the reply completes its connection, because a peer that
        has given up may have left its request behind. A peer that sends nothing delays no other.
        ``allows`` says whether a process of a rank may connect now.
        """
        self._allows, accepted = allows, {}
        for key, _ in self._selector.select(0):
            connection: Any = key.fileobj
            if connection is self._listener:
                self._begin()
                continue
            _, greeting = key.data
            try:
                next(greeting)
                continue
            except StopIteration as end:
                rank = end.value
            except OSError:  # the peer has disconnected
                rank = None
            self._selector.unregister(connection)
            if rank is None:
                connection.close()
            else:
                accepted[rank] = connection
        self._close_old()
        return accepted

    def refuse(self) -> None:
        """Refuses connections from now on; called by any thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes all sockets. A forked child may call it: the parent keeps its own."""
        for key in self._selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _begin(self) -> None:
        try:
            connection = self._listener.accept()[0]
        except OSError:  # the peer has disconnected, or descriptors have run out
            time.sleep(_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        greeting = self._greet(connection)
        next(greeting)
        pending = time.monotonic(), greeting
        self._selector.register(connection, selectors.EVENT_READ, pending)

    def _greet(self, connection: socket.socket) -> Generator[None, None, int | None]:
        """Reads a challenge and a rank, replies with a proof and a challenge, and reads a proof.

        It is advanced when the connection has sent something. Returns the rank of a peer, or None
        for a stranger.
        """

        def read(size: int) -> Generator[None, None, bytes]:
            data = b""
            while len(data) < size:
                yield
                if not (received := connection.recv(size - len(data))):
                    raise ConnectionResetError
                data += received
            return data

        request = yield from read(_REQUEST.size)
        _, rank = _REQUEST.unpack(request)
        challenges = request + (own := secrets.token_bytes(_CHALLENGE_BYTES))
        reply = own + _proof(self._secret, b"listener", challenges)
        if not self._allows(rank) or connection.send(reply) < len(reply):
            return None
        expected = _proof(self._secret, b"peer", challenges) + _FIRST_BYTE
        answer = yield from read(len(expected))
        return rank if secrets.compare_digest(answer, expected) and self._allows(rank) else None

    def _close_old(self) -> None:
        """Closes connections that have not become complete in time, and the oldest of too many."""
        until = time.monotonic() - _REPLY_SECONDS
        pending = [key for key in self._selector.get_map().values() if key.data is not None]
        for newer, key in enumerate(sorted(pending, key=lambda key: -key.data[0])):
            if newer >= _MOST_PENDING or key.data[0] < until:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def connect(
    hosts: Sequence[str], port: int, secret: bytes, rank: int, seconds: float
) -> socket.socket | None:
    """Connects to the first address whose listener proves that it knows the secret.

    The caller must send a message at once. Returns None after the timeout.
    """
    deadline, patience = time.monotonic() + seconds, _FIRST_REPLY_SECONDS
    while time.monotonic() < deadline:
        for host in hosts:
            with contextlib.suppress(OSError), contextlib.ExitStack() as on_failure:
                connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
                on_failure.callback(connection.close)
                connection.settimeout(patience)
                request = _REQUEST.pack(secrets.token_bytes(_CHALLENGE_BYTES), rank)
                connection.sendall(request)
                with connection.makefile("rb") as stream:
                    reply = stream.read(_CHALLENGE_BYTES + _PROOF_BYTES)
                challenges = request + reply[:_CHALLENGE_BYTES]
                expected = _proof(secret, b"listener", challenges)
                if secrets.compare_digest(reply[_CHALLENGE_BYTES:], expected):
                    connection.sendall(_proof(secret, b"peer", challenges))
                    on_failure.pop_all()
                    return connection
        time.sleep(_PAUSE_SECONDS)
        patience = min(2 * patience, _REPLY_SECONDS)
    return None


class JsonSocket:
    """A connected socket and the rank of its peer. Messages are lists.

    Input that is not a message is ignored.

    >>> ours, theirs = socket.socketpair()
    >>> here, there = JsonSocket(ours, rank=1), JsonSocket(theirs, rank=0)
    >>> here.send("beat", [2])
    >>> there.read()
    [['beat', [2]]]
    """

    def __init__(self, connection: socket.socket, rank: int):
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        self.last_received = time.monotonic()
        #: Something has arrived.
        self.heard = False
        #: The peer has announced that it exits normally.
        self.exiting = False
        #: The peer has closed the connection, or the kernel has given it up.
        self.closed = False
        self._incomplete = b""

    def send(self, kind: str, *arguments: Any) -> None:
        """Sends a message without blocking. It is lost if the peer's buffer is full."""
        # The leading newline ends a message that was sent only in part before.
        with contextlib.suppress(OSError):
            self.connection.send(b"\n" + json.dumps([kind, *arguments]).encode() + b"\n")

    def read(self) -> list[list[Any]]:
        """Returns the messages that have arrived. Sets ``closed`` after the last one."""
        try:
            data = self.connection.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        self.last_received, self.heard = time.monotonic(), True
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        if len(self._incomplete) > MAX_MESSAGE_BYTES:
            self._incomplete = b""
        return [message for line in lines if (message := _parsed(line))]


def _parsed(line: bytes) -> list[Any]:
    """Returns the message in a line, or an empty list if there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        return []
    return message if isinstance(message, list) else []


class Contact(NamedTuple):
    """Where a process listens."""

    rank: int
    hosts: list[str]
    port: int
    secret: bytes


class Links:
    """The connections of a process: to the one that it reports to, and to those that report to it.

    Args:
        size: Number of processes.
        name: Rank and host of this process.
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
        contacts: Sequence[Contact],
        acceptor: Acceptor | None,
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

    def say_bye(self, exited: list[list[int]]) -> None:
        """Tells all peers that this process exits, and which have before; called by any thread."""
        self.closing = True
        if self._acceptor is not None:
            self._acceptor.refuse()
        for peer in list(self.peers):
            peer.send("bye", *exited)

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
    rank, listener = comm.Get_rank(), listen()
    secret = comm.bcast(secrets.token_bytes(_PROOF_BYTES))
    own = (addresses(), listener.getsockname()[1]) if listener is not None else ([], 0)
    places: list[tuple[list[str], int]] = comm.allgather(own)
    ranks = dict.fromkeys([*ancestors(tree, rank), *range(min(rank, _FIRST_RANKS))])
    contacts = [Contact(r, places[r][0], places[r][1], secret_of(secret, r)) for r in ranks]
    acceptor = Acceptor(listener, secret_of(secret, rank)) if listener is not None else None
    return Links(rank, len(tree), name, contacts, acceptor)
