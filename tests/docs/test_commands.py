"""The page on commands has every command with all its options and choices, and no others."""

import argparse
import re
from pathlib import Path

import pytest

from jdaso import __main__

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "commands.md"
COMMANDS = ("doctor", "predict", "tune", "sbatch", "verify")


class Captured(Exception):
    """Holds the parser of ``python -m jdaso``."""


def commands(monkeypatch) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command."""

    def capture(parser):
        raise Captured(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", capture)
    with pytest.raises(Captured) as error:
        __main__.main()
    (parser,) = error.value.args
    (subparsers,) = (x for x in parser._actions if isinstance(x, argparse._SubParsersAction))
    return subparsers.choices


def section(text: str, command: str) -> str:
    """The text below the heading of a command."""
    return re.search(rf"^## {command}$(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def options_of_rows(text: str) -> set[str]:
    """The options in the first column of a table."""
    cells = re.findall(r"^\| (`--.*?) \|", text, re.M)
    return {option for cell in cells for option in re.findall(r"`(--[\w-]+)`", cell)}


def test_the_page_has_all_commands(monkeypatch):
    parsers = commands(monkeypatch)
    assert sorted(parsers) == sorted(COMMANDS)
    assert sorted(re.findall(r"^## (.*)$", PAGE.read_text(), re.M)) == sorted(parsers)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_section_has_all_options_and_choices(monkeypatch, command):
    parser = commands(monkeypatch)[command]
    text = section(PAGE.read_text(), command)
    actions = [x for x in parser._actions if not isinstance(x, argparse._HelpAction)]
    options = {option for action in actions for option in action.option_strings}
    assert options_of_rows(text) == options
    for action in actions:
        assert [c for c in action.choices or () if f"`{c}`" not in text] == []


def test_a_missing_option_is_found():
    rows = "| `--repeats` | 5 |\n| `--requeue`, `--no-requeue` | `--mpi` |"
    text = f"## tune\n{rows}\n## predict\n| `--out` |\n"
    assert options_of_rows(section(text, "tune")) == {"--repeats", "--requeue", "--no-requeue"}
