"""Every dotted name of jdaso in the Markdown files exists."""

import re
from pathlib import Path

import pytest

import jdaso

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"(?<![\w./~-])jdaso((?:\.[A-Za-z_]\w*)+)")
IMPORT = re.compile(r"^from (jdaso[\w.]*) import ([\w, ]+)$", re.MULTILINE)


def names(text: str) -> set[str]:
    """The dotted names in a text, among them those that an import line gives."""
    imported = {
        f"{module}.{name.strip()}"
        for module, listed in IMPORT.findall(text)
        for name in listed.split(",")
    }
    return {f"jdaso{rest}" for rest in NAME.findall(text)} | imported


def resolves(name: str) -> bool:
    """Whether getattr finds the name, as it does for a user who has imported only jdaso."""
    found = jdaso
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True


@pytest.mark.parametrize("file", ["README.md", "bench/README.md"])
def test_names_resolve(file):
    text = (ROOT / file).read_text()
    found = names(text)
    assert found
    assert [name for name in sorted(found) if not resolves(name)] == []


@pytest.mark.parametrize("file", ["README.md", "bench/README.md"])
def test_modules_of_commands_exist(file):
    text = (ROOT / file).read_text()
    paths = set(re.findall(r"(?:python|\()\s*((?:examples|bench)/[\w/]+\.\w+)", text))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []


def test_a_missing_name_is_found():
    assert names("`jdaso.daso` and\nfrom jdaso.faults import Kind, gone\n") == {
        "jdaso.daso",
        "jdaso.faults",
        "jdaso.faults.Kind",
        "jdaso.faults.gone",
    }
    assert resolves("jdaso.faults.Kind")
    assert not resolves("jdaso.faults.gone")
