"""How two processes of a job find each other and connect, for the heartbeat.

Rank 0 listens at a port, and the others connect to it. Both sides prove that they know the secret
of the job, which is never sent. What travels afterwards are lines of JSON.
"""

import contextlib
import hmac
import ipaddress
import json
import re
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

_BACKLOG = 1024  # connections that wait until they are accepted
_CONNECT_SECONDS, _REPLY_SECONDS, _PAUSE_SECONDS = 1.0, 5.0, 0.1
_FIRST_REPLY_SECONDS = 1.0  # doubled with each attempt, because a stranger may have the address
_CHALLENGE_BYTES, _PROOF_BYTES = 16, 32
_REQUEST = struct.Struct(f">{_CHALLENGE_BYTES}sI")  # challenge, rank
_FIRST_BYTE = b"\n"  # of every message
# Connections of an Acceptor that are not complete.
_MOST_PENDING = 1024
# A longer line is not a message of this protocol.
MAX_MESSAGE_BYTES = 1 << 16
# Linux lists the addresses of its interfaces here.
_IPV4_TABLE, _IPV6_TABLE = Path("/proc/net/fib_trie"), Path("/proc/net/if_inet6")


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
        while True:
            try:
                connection = self._listener.accept()[0]
            except BlockingIOError:  # no other one waits
                return
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
        send_all([self], kind, *arguments)

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
        return [message for line in lines if line and (message := _parsed(line))]


def send_all(peers: Iterable[JsonSocket], kind: str, *arguments: Any) -> None:
    """Sends a message to each peer, as :meth:`JsonSocket.send` does."""
    # The leading newline ends a message that was sent only in part before.
    line = b"\n" + json.dumps([kind, *arguments]).encode() + b"\n"
    for peer in peers:
        with contextlib.suppress(OSError):
            peer.connection.send(line)


def _parsed(line: bytes) -> list[Any]:
    """Returns the message in a line, or an empty list if there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        return []
    return message if isinstance(message, list) else []
