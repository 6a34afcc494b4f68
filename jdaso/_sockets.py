"""A socket between the first process and each other one; strangers who connect are sent away."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

_SECRET_BYTES = 16
_HELLO = struct.Struct(f">{_SECRET_BYTES}sI")
_CONNECT_SECONDS, _ANSWER_SECONDS, _PAUSE_SECONDS = 1.0, 5.0, 0.1


class Secret(NamedTuple):
    """What one of ours says, and what it is answered; nobody else knows them."""

    hello: bytes
    welcome: bytes


def new_secret() -> Secret:
    """A secret for one meeting."""
    return Secret(secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES))


def admit(
    listener: socket.socket,
    secret: Secret,
    ranks: Collection[int],
    seconds: float,
    meanwhile: Callable[[], object] = bool,
) -> dict[int, socket.socket]:
    """Connections from these ranks, those that come in time; closes the listener.

    Who does not know the secret is sent away, and who says nothing delays nobody. ``meanwhile``
    is called again and again until all are there.
    """
    admitted: dict[int, socket.socket] = {}
    until = time.monotonic() + seconds
    with listener, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, b"")
        while len(admitted) < len(ranks) and (left := until - time.monotonic()) > 0:
            meanwhile()
            for key, _ in selector.select(min(left, _PAUSE_SECONDS)):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is listener:
                    _accept(listener, selector)
                    continue
                said = key.data + _received(connection, _HELLO.size - len(key.data))
                if len(key.data) < len(said) < _HELLO.size:
                    selector.modify(connection, selectors.EVENT_READ, said)
                    continue
                selector.unregister(connection)
                rank = _rank(said, secret)
                if rank in ranks and _sent(connection, secret.welcome):
                    # Who comes again has given up on the first connection.
                    admitted[rank], connection = connection, admitted.get(rank, connection)
                if connection not in admitted.values():
                    connection.close()
        for key in selector.get_map().values():
            key.fileobj.close()  # type: ignore[union-attr]
    return admitted


def join(
    hosts: Sequence[str], port: int, secret: Secret, rank: int, seconds: float
) -> socket.socket | None:
    """A connection to the first address at which :func:`admit` answers; None after so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for host in hosts:
            with contextlib.suppress(OSError), contextlib.ExitStack() as unless_welcome:
                connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
                unless_welcome.callback(connection.close)
                connection.settimeout(_ANSWER_SECONDS)
                connection.sendall(_HELLO.pack(secret.hello, rank))
                if secrets.compare_digest(connection.recv(_SECRET_BYTES), secret.welcome):
                    unless_welcome.pop_all()
                    connection.setblocking(False)
                    return connection
        time.sleep(_PAUSE_SECONDS)
    return None


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    with contextlib.suppress(OSError):  # it has gone again, or there is no descriptor for it
        connection = listener.accept()[0]
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, b"")


def _received(connection: socket.socket, size: int) -> bytes:
    try:
        return connection.recv(size)
    except OSError:
        return b""


def _sent(connection: socket.socket, data: bytes) -> bool:
    try:
        return connection.send(data) == len(data)
    except OSError:
        return False


def _rank(said: bytes, secret: Secret) -> int:
    """Who has said this; -1 for a stranger."""
    if len(said) != _HELLO.size:
        return -1
    hello, rank = _HELLO.unpack(said)
    return rank if secrets.compare_digest(hello, secret.hello) else -1
