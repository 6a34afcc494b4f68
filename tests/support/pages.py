"""Executes the Python blocks of a Markdown page, as a reader would type them.

All blocks of a page share one scope and run in order. HTML comments extend what readers see:

- ``<!--python ... -->`` is executed as well, for set-up that a page leaves out.
- ``<!--devices: 4-->`` gives the page so many virtual CPU devices, in a process of its own.
- ``<!--slow-->`` gives the page the marker ``slow``.

If a block ``text`` follows a Python block at once, it is what the block prints. Numbers may differ
by 5 %, because XLA rounds differently on other processors.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?|^<!--python\n(.*?)^-->$", re.M | re.S
)
DEVICES = re.compile(r"^<!--devices: (\d+)-->$", re.M)


class Block(NamedTuple):
    """A block with the line of its page where its code begins, and what it prints, or None."""

    line: int
    code: str
    output: str | None


def pages() -> list[Path]:
    """README and all pages of the documentation."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in found if "_build" not in page.parts)]


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [
        Block(text.count("\n", 0, found.start()) + 2, found[1] or found[3] or "", found[2])
        for found in BLOCK.finditer(text)
    ]


def devices(text: str) -> int | None:
    """The number of virtual devices that a page asks for."""
    found = DEVICES.search(text)
    return int(found[1]) if found else None


def same(printed: str, expected: str) -> bool:
    """Whether two texts have the same words, and numbers that are close."""
    mine, other = (re.split(r"[\s,()\[\]]+", text.strip()) for text in (printed, expected))
    return len(mine) == len(other) and all(map(_close, mine, other))


def _close(word: str, other: str) -> bool:
    try:
        return math.isclose(float(word), float(other), rel_tol=0.05)
    except ValueError:
        return word == other


def execute(page: Path) -> None:
    """Executes a page. Raises AssertionError if it prints something else than it says."""
    scope: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        if block.output is not None:
            shown = printed.getvalue()
            assert same(shown, block.output), f"{page}:{block.line} prints\n{shown}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    import jdaso

    jdaso.cluster.use_virtual_devices(devices(page.read_text()) or 1)
    execute(page)
