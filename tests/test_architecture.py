"""Imports between the parts of the package go one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jdaso

PACKAGE = Path(jdaso.__file__).parent
# Every entry of the package, from the lowest to the highest, and the entries that it may import.
ENTRIES = {
    "core": set(),
    "schedules": {"core"},
    "cluster": {"core"},
    "algorithms": {"core", "schedules"},
    "exchange": {"core", "cluster"},
    "checkpoint": {"core", "cluster"},
    "passm": {"core", "cluster", "exchange"},
    "center": {"core", "schedules", "cluster", "exchange", "algorithms"},
    "perf": {"core", "schedules", "cluster", "exchange", "algorithms"},
    "faults": {"core", "checkpoint"},
}
ENTRIES["__init__"] = ENTRIES["__main__"] = {*ENTRIES, "__version__"}
WITHOUT_NETWORK = {"core", "schedules", "algorithms"}
# Folders and files inside an entry, and what of the same entry they may import.
INSIDE = {
    "exchange/host": {"exchange/host"},
    "exchange/transport": {"exchange/host", "exchange/transport"},
    "exchange/axis.py": set(),
}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    return str(path.relative_to(PACKAGE))


def entry(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """Full names of what a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            # "from jdaso import x" imports jdaso.x, if there is such a module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_entry_is_in_the_table():
    entries = {
        path.stem for path in PACKAGE.iterdir() if path.name not in ("py.typed", "__pycache__")
    }
    assert entries == ENTRIES.keys()
    assert len(entries) <= 12


def test_the_table_has_no_cycle():
    lower = set()
    for name, imported in ENTRIES.items():
        if name.startswith("__"):
            continue
        assert imported <= lower, name
        lower.add(name)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_the_table_allows(path):
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "jdaso":
            assert rest, "import the module, not the package"
            assert rest.partition(".")[0] in ENTRIES[entry(path)] | {entry(path)}, name


@pytest.mark.parametrize("folder", INSIDE)
def test_a_folder_inside_an_entry_imports_only_what_the_table_allows(folder):
    parent = folder.partition("/")[0]
    given = PACKAGE / folder
    for path in [given] if given.is_file() else given.rglob("*.py"):
        for name in imports(path):
            if name.startswith(f"jdaso.{parent}."):
                allowed = tuple(f"jdaso.{x.replace('/', '.')}." for x in INSIDE[folder])
                assert name.startswith(allowed), f"{path}: {name}"


@pytest.mark.parametrize("path", [p for p in FILES if entry(p) in WITHOUT_NETWORK], ids=name_of)
def test_algorithms_know_no_network(path):
    assert {name.partition(".")[0] for name in imports(path)}.isdisjoint({"mpi4py", "mpi4jax"})


def test_import_jdaso_imports_no_mpi_and_nothing_of_the_examples():
    names = {"mpi4py", "mpi4jax", "sklearn", "matplotlib", "PIL", "orbax"}
    code = f"import sys, jdaso; sys.exit(bool(sys.modules.keys() & {names}))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_folder_says_what_it_is_for():
    for init in PACKAGE.rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(init.read_text())), init


def test_public_names():
    assert len(jdaso.__all__) == len(set(jdaso.__all__)) <= 40
    assert all(hasattr(jdaso, name) for name in jdaso.__all__)
