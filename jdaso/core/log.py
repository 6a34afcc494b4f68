"""The logger of the package, ``logging.getLogger("jdaso")``.

It writes warnings to stderr, with the prefix ``jdaso:``. With ``JDASO_DEBUG=1`` in the environment,
it also writes a line for each exchange, with the rank of its process. It does not pass records to
the root logger, because libraries such as orbax configure that one for their own purposes. A
program that wants the records adds a handler, or sets ``propagate``.

With ``JDASO_LOG=PATH`` in the environment, all that jdaso says also goes to the file ``PATH.HOST``
of each host, because the hosts of a network file system cannot append to one file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time

_file = os.environ.get("JDASO_LOG", "")
if _file:  # absolute, because the program may change its folder
    _file = f"{os.path.abspath(_file)}.{socket.gethostname()}"


def record(text: str) -> None:
    """Appends a line to the file of this host, if there is one."""
    if _file:
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}: {text}\n"
        # Closed at once, so that a network file system has the line.
        with contextlib.suppress(OSError), open(_file, "ab", buffering=0) as file:
            file.write(line.encode(errors="backslashreplace"))


class _StderrHandler(logging.Handler):
    """Writes each record with one call, because the lines of several processes must not mix."""

    def emit(self, entry: logging.LogRecord) -> None:
        text = self.format(entry)
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write(f"jdaso: {text}\n")
            sys.stderr.flush()
        record(text)


logger = logging.getLogger("jdaso")
logger.addHandler(_StderrHandler())
logger.propagate = False
debug = os.environ.get("JDASO_DEBUG", "") not in ("", "0")
logger.setLevel(logging.DEBUG if debug else logging.WARNING)
if _file:
    try:
        open(_file, "ab").close()
    except OSError as error:
        logger.warning("JDASO_LOG: %s cannot be written: %s.", _file, error.strerror)
