"""A line to another process: messages that are lists, one JSON text each, in both directions."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

# What is longer is no message of ours.
LONGEST_BYTES = 1 << 16


class Line:
    """A connected socket, and whose it is; what arrives and is no message is ignored.

    >>> ours, theirs = socket.socketpair()
    >>> here, there = Line(ours, rank=1), Line(theirs, rank=0)
    >>> here.send("beat", [2])
    >>> there.read()
    [['beat', [2]]]
    """

    def __init__(self, connection: socket.socket, rank: int):
        connection.setblocking(False)
        self.connection = connection
        self.rank = rank
        self.heard = time.monotonic()
        #: The other side has said that it ends.
        self.over = False
        #: The other side has closed, or the kernel has given it up.
        self.closed = False
        self._rest = b""

    def send(self, kind: str, *rest: Any) -> None:
        """Sends at once or, where the other side does not read, not at all."""
        # What could be sent only in part must not spoil the next one, hence the first newline.
        with contextlib.suppress(OSError):
            self.connection.send(b"\n" + json.dumps([kind, *rest]).encode() + b"\n")

    def read(self) -> list[list[Any]]:
        """The messages that have arrived; sets ``closed`` after the last one."""
        try:
            data = self.connection.recv(LONGEST_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_BYTES:
            self._rest = b""
        return [message for line in lines if (message := _parsed(line))]


def _parsed(line: bytes) -> list[Any]:
    """A message, or an empty list."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        return []
    return message if isinstance(message, list) else []
