"""What commands share: the paths that users give, and tables and text for the terminal."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

# pathlib makes "s3:/bucket" of "s3://bucket", and Windows has drives of one letter.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]+):/(/(?P<host>[^/]*))?(?P<path>.*)", re.DOTALL
)


def local_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """The path of a file or folder, with ``~`` expanded and ``file://`` removed.

    Args:
        path: A path, or a URL such as ``file:///data/run``.
        name: The name of the argument, for errors.

    Raises:
        ValueError: If the path is empty, if it is a URL of another scheme, such as ``s3://``, or of
            a file on another host, or if ``~user`` names nobody. pathlib would make a folder
            ``s3:`` below the working directory.

    >>> str(local_path("file:///data/run%201")), str(local_path("runs/x"))
    ('/data/run 1', 'runs/x')
    """
    text = os.fspath(path)
    if not text:
        raise ValueError(f"{name} must be the path of a file or folder, got an empty text.")
    if not (url := _URL.fullmatch(text)):
        try:
            return Path(text).expanduser()
        except RuntimeError as error:
            raise ValueError(
                f"{name} must begin with the ~ of a user of this machine, got {text!r}: {error} "
                "For a folder whose name begins with ~, write ./~."
            ) from error
    if url["scheme"].lower() != "file":
        raise ValueError(
            f"{name} must be a path in a file system, got {text!r}, and jdaso opens no URL of the "
            f"scheme {url['scheme']}://. Mount that storage and give the path at which it is "
            "mounted, or use a local folder and copy it with the tools of the storage."
        )
    if (url["host"] or "localhost") != "localhost":
        raise ValueError(
            f"{name} must be on this machine, got {text!r}, a file on the host {url['host']!r}. "
            "Write the absolute path after file://, as in file:///data/run."
        )
    return Path(unquote("/" + url["path"].lstrip("/")))


def path_option(text: str) -> Path:
    """:func:`local_path` as the ``type`` of an option, for which argparse prints the reason."""
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def text_table(rows: Sequence[tuple[str, ...]], numbers: bool = True) -> str:
    """Formats rows as text. Columns of ``numbers``, all but the first, are aligned to the right.

    >>> print(text_table([("", "loss"), ("sgd", "0.1")]))
         loss
    sgd   0.1
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if numbers and place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def wrapped(text: str) -> str:
    """The text with lines of at most the terminal's width, if the output is one.

    Lines to copy, with a command or a call, are not wrapped.

    >>> print(wrapped("one line"))
    one line
    """
    width = shutil.get_terminal_size(fallback=(1 << 16, 0)).columns
    return "\n".join(
        line
        if "python -m jdaso" in line or line.startswith("jdaso.")
        else textwrap.fill(line, width)
        for line in text.split("\n")
    )
