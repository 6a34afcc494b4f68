"""A connection to another process that carries JSON messages, one per line."""

import contextlib
import json
import socket
import time
from typing import Any

# A longer line is not a message of this protocol.
MAX_MESSAGE_BYTES = 1 << 16


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
    """The message in a line; an empty list if there is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested too deeply
        return []
    return message if isinstance(message, list) else []
