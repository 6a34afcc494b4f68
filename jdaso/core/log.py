"""The logger of the package, ``logging.getLogger("jdaso")``.

It writes warnings to stderr, with the prefix ``jdaso:``. With ``JDASO_DEBUG=1`` in the environment,
it also writes a line for each exchange, with the rank of its process. It does not pass records to
the root logger, because libraries such as orbax configure that one for their own purposes. A
program that wants the records adds a handler, or sets ``propagate``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys


class _StderrHandler(logging.Handler):
    """Writes each record with one call, because the lines of several processes must not mix."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError):  # stderr is closed
            sys.stderr.write(f"jdaso: {self.format(record)}\n")
            sys.stderr.flush()


logger = logging.getLogger("jdaso")
logger.addHandler(_StderrHandler())
logger.propagate = False
debug = os.environ.get("JDASO_DEBUG", "") not in ("", "0")
logger.setLevel(logging.DEBUG if debug else logging.WARNING)
