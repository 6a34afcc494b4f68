"""TCP connections between the processes of a job.

A process that listens replies to peers that send the secret, and closes other connections. The
first message of a peer after the reply completes its connection, because a peer that has given up
may have left its request behind. A peer that connects but sends nothing does not delay the others.
"""

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

_SECRET_BYTES = 16
_REQUEST = struct.Struct(f">{_SECRET_BYTES}sI")  # secret, rank
_FIRST_BYTE = b"\n"  # of every message
_CONNECT_SECONDS, _REPLY_SECONDS, _PAUSE_SECONDS = 1.0, 5.0, 0.1
# Connections of an Acceptor that are not complete.
_MOST_PENDING = 256


class Secret(NamedTuple):
    """What a process of this job sends when it connects, and what the listener replies."""

    request: bytes
    reply: bytes


def new_secret() -> Secret:
    return Secret(secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES))


class _Pending(NamedTuple):
    """A connection that is not complete: what it has sent, and its rank after the reply."""

    since: float
    request: bytes = b""
    rank: int | None = None


class Acceptor:
    """Accepts connections to a listening socket. A selector can wait for it.

    Args:
        listener: The socket. It belongs to this object.
        secret: What peers must send.
    """

    def __init__(self, listener: socket.socket, secret: Secret):
        self._listener, self._secret = listener, secret
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        return self._selector.fileno()

    def accept(
        self, allows: Callable[[int], bool], seconds: float = 0.0
    ) -> dict[int, socket.socket]:
        """The connections that have become complete, by rank. Waits at most some seconds.

        ``allows`` says whether a process of a rank may connect now.
        """
        accepted = {}
        for key, _ in self._selector.select(seconds):
            connection, pending = key.fileobj, key.data
            assert isinstance(connection, socket.socket)
            if connection is self._listener:
                self._begin()
            elif pending.rank is None:
                self._answer(connection, pending, allows)
            else:
                self._selector.unregister(connection)
                if _received(connection, len(_FIRST_BYTE)) == _FIRST_BYTE:
                    accepted[pending.rank] = connection
                else:
                    connection.close()
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
        self._selector.register(connection, selectors.EVENT_READ, _Pending(time.monotonic()))

    def _answer(
        self, connection: socket.socket, pending: _Pending, allows: Callable[[int], bool]
    ) -> None:
        """Reads a request, and replies if it is complete and allowed."""
        request = pending.request + _received(connection, _REQUEST.size - len(pending.request))
        rank = None
        if len(request) == _REQUEST.size:
            rank = _rank(request, self._secret)
            goes_on = rank >= 0 and allows(rank) and _sent(connection, self._secret.reply)
        else:
            goes_on = len(request) > len(pending.request)
        if goes_on:
            pending = pending._replace(request=request, rank=rank)
            self._selector.modify(connection, selectors.EVENT_READ, pending)
        else:
            self._selector.unregister(connection)
            connection.close()

    def _close_old(self) -> None:
        """Closes connections that have not become complete in time, and the oldest of too many."""
        until = time.monotonic() - _REPLY_SECONDS
        pending = [key for key in self._selector.get_map().values() if key.data is not None]
        for newer, key in enumerate(sorted(pending, key=lambda key: -key.data.since)):
            if newer >= _MOST_PENDING or key.data.since < until:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]


def connect(
    hosts: Sequence[str], port: int, secret: Secret, rank: int, seconds: float
) -> socket.socket | None:
    """Connects to the first address that answers with the secret's reply; None on timeout.

    The caller must send a message at once.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for host in hosts:
            with contextlib.suppress(OSError), contextlib.ExitStack() as on_failure:
                connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
                on_failure.callback(connection.close)
                connection.settimeout(_REPLY_SECONDS)
                connection.sendall(_REQUEST.pack(secret.request, rank))
                if secrets.compare_digest(connection.recv(_SECRET_BYTES), secret.reply):
                    on_failure.pop_all()
                    connection.setblocking(False)
                    return connection
        time.sleep(_PAUSE_SECONDS)
    return None


def _received(connection: socket.socket, size: int) -> bytes:
    with contextlib.suppress(OSError):
        return connection.recv(size)
    return b""


def _sent(connection: socket.socket, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        return connection.send(data) == len(data)
    return False


def _rank(request: bytes, secret: Secret) -> int:
    """The rank that sent a request; -1 if the request does not contain the secret."""
    received, rank = _REQUEST.unpack(request)
    return rank if secrets.compare_digest(received, secret.request) else -1
