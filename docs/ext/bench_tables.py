"""Tables of bench/README.md, which is the one place of measured figures.

The directive ``measured`` shows a table of a section with the command that printed it::

    ```{measured} Beside PyTorch
    :table: 2
    ```

The functions are also used by ``figures.py`` and by the tests, which run without Sphinx.
"""

from __future__ import annotations

import re
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench" / "README.md"
# Of a benchmark, not those that the text mentions besides.
COMMAND = re.compile(r"`((?!python -m jdaso)(?:python|mpiexec|mpirun|make)\s[^`]+)`")
UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|MB|%)\b)")


def section(title: str) -> str:
    """The text of a section of bench/README.md.

    Raises:
        ValueError: if there is no such section.
    """
    parts = re.split(r"^## +(.*)$", BENCH.read_text(), flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    if title not in found:
        raise ValueError(f"bench/README.md has no section {title!r}; it has {', '.join(found)}.")
    return found[title]


def tables(title: str) -> list[tuple[str, list[str]]]:
    """Each table of a section: the last command before it, and its lines."""
    found: list[tuple[str, list[str]]] = []
    text, lines = "", []
    for line in [*section(title).splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
            continue
        if lines:
            commands = COMMAND.findall(text)
            found.append((" ".join(commands[-1].split()) if commands else "", lines))
            lines = []
        text += line + "\n"
    return found


def table(title: str, number: int = 1) -> tuple[str, list[str]]:
    """Command and lines of one table of a section, counted from 1.

    Raises:
        ValueError: if there is no such table.
    """
    found = tables(title)
    if not 1 <= number <= len(found):
        raise ValueError(f"section {title!r} has {len(found)} tables, got number {number}.")
    return found[number - 1]


def rows(title: str, number: int = 1) -> list[dict[str, str]]:
    """The rows of a table, as dictionaries from the names of its columns."""
    head, _, *body = (
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in table(title, number)[1]
    )
    return [dict(zip(head, row, strict=True)) for row in body]


def machine() -> str:
    """The line of bench/README.md that describes the machine."""
    return re.search(r"^All figures below: (.*)$", BENCH.read_text(), re.MULTILINE)[1]


def without_links(line: str) -> str:
    """A line of Markdown with the text of its links, whose targets are relative to bench/."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line)


def setup(app):
    from docutils import nodes
    from docutils.parsers.rst import directives
    from docutils.statemachine import StringList
    from sphinx.util.docutils import SphinxDirective

    class Measured(SphinxDirective):
        required_arguments = 1
        final_argument_whitespace = True
        option_spec = {"table": directives.positive_int}  # noqa: RUF012

        def run(self):
            self.env.note_dependency(str(BENCH))
            try:
                command, lines = table(self.arguments[0], self.options.get("table", 1))
            except ValueError as error:
                raise self.error(str(error)) from error
            text = [f"`{command}`", ""] if command else []
            text += [UNIT.sub("\N{NO-BREAK SPACE}", without_links(line)) for line in lines]
            container = nodes.container()
            self.state.nested_parse(StringList(text, str(BENCH)), self.content_offset, container)
            return container.children

    class Machine(SphinxDirective):
        def run(self):
            return [nodes.paragraph("", f"Machine: {machine()}")]

    app.add_directive("measured", Measured)
    app.add_directive("machine", Machine)
    return {"parallel_read_safe": True}
