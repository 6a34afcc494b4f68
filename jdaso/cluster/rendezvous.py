"""TCP connections between rank 0 and all other ranks.

Connections that do not send the secret are closed. A peer that connects but sends nothing does
not delay the others.
"""

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

_SECRET_BYTES = 16
_REQUEST = struct.Struct(f">{_SECRET_BYTES}sI")  # secret, rank
_CONNECT_SECONDS, _REPLY_SECONDS, _PAUSE_SECONDS = 1.0, 5.0, 0.1


class Secret(NamedTuple):
    """What a process of this job sends when it connects, and what rank 0 replies."""

    request: bytes
    reply: bytes


def new_secret() -> Secret:
    return Secret(secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES))


def accept_peers(
    listener: socket.socket,
    secret: Secret,
    ranks: Collection[int],
    seconds: float,
    meanwhile: Callable[[], object] = bool,
) -> dict[int, socket.socket]:
    """Accepts connections from ``ranks`` until all have connected or ``seconds`` are over.

    Calls ``meanwhile`` repeatedly. Closes the listener at the end.
    """
    accepted: dict[int, socket.socket] = {}
    deadline = time.monotonic() + seconds
    with listener, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, b"")
        while len(accepted) < len(ranks) and (left := deadline - time.monotonic()) > 0:
            meanwhile()
            for key, _ in selector.select(min(left, _PAUSE_SECONDS)):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is listener:
                    _accept(listener, selector)
                    continue
                request = key.data + _received(connection, _REQUEST.size - len(key.data))
                if len(key.data) < len(request) < _REQUEST.size:
                    selector.modify(connection, selectors.EVENT_READ, request)
                    continue
                selector.unregister(connection)
                rank = _rank(request, secret)
                if rank in ranks and _sent(connection, secret.reply):
                    # A peer that connects again has given up its first connection.
                    accepted[rank], connection = connection, accepted.get(rank, connection)
                if connection not in accepted.values():
                    connection.close()
        for key in selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]
    return accepted


def connect(
    hosts: Sequence[str], port: int, secret: Secret, rank: int, seconds: float
) -> socket.socket | None:
    """Connects to the first address that answers with the secret's reply; None on timeout."""
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


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    with contextlib.suppress(OSError):  # the peer has disconnected, or descriptors have run out
        connection = listener.accept()[0]
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, b"")


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
    if len(request) != _REQUEST.size:
        return -1
    received, rank = _REQUEST.unpack(request)
    return rank if secrets.compare_digest(received, secret.request) else -1
