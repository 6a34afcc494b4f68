"""Tables as text, for the command line."""

import shutil
import textwrap
from collections.abc import Sequence


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
