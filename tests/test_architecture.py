"""Imports point downwards only, and MPI stays out of what does not need it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import jdaso

PACKAGE = Path(jdaso.__file__).parent
ENGINE = {
    "_agreement",
    "_base",
    "_center",
    "_communicate",
    "_engine",
    "_feedback",
    "_fragments",
    "_leaves",
    "_state",
    "_subject",
    "_wire",
}
FOUNDATION = {"_agreement", "_base", "_int8", "_leaves", "_wire"}
LEAVES = {"schedules", "local", "perf"}
# What files of a row may import from jdaso; a name stands for the module and all below it.
ROWS = {
    "_addresses": set(),
    "_at_exit": set(),
    "_line": set(),
    "_sockets": set(),
    "_heartbeat": {"_addresses", "_line", "_sockets"},
    "_ending": {"_last_resort"},
    "_last_resort": set(),
    "_int8": set(),
    "_wire": {"_int8"},
    "_agreement": {"_base"},
    "_apply_updates": FOUNDATION,
    "_checks": set(),
    "_faults": {"_checks"},
    "_checkpoint_folder": {"_meeting", "topology"},
    "_checkpoint_part": {"_base", "_in_flight"},
    "_base": set(),
    "_center": {"_base"},
    "_images": set(),
    "_host": {"_base"},
    "_in_flight": {"_base", "_state"},
    "_interruption": {"_base"},
    "_launcher": {"_base"},
    "_layout": {"_base"},
    "_meeting": {"_base", "topology"},
    "_network": {"_checks", "_int8"},
    "_leaves": {"_base", "_wire"},
    "_small_cnn": set(),
    "_state": {"_base"},
    "_fragments": FOUNDATION,
    "_subject": FOUNDATION,
    "_feedback": FOUNDATION,
    "_communicate": FOUNDATION | {"_feedback", "_state"},
    "_engine": FOUNDATION | {"_communicate", "_feedback", "_fragments", "_state", "_subject"},
    "_drain": FOUNDATION | {"_engine", "_memory", "_state"},
    "_memory": FOUNDATION | {"_engine", "_state"},
    "_consensus": FOUNDATION | {"_state"},
    "_metrics": FOUNDATION | {"_consensus", "_state"},
    "_runs": set(),
    **dict.fromkeys(LEAVES, FOUNDATION | {"_checks", "_network"}),
    "topology": FOUNDATION | LEAVES | {"_at_exit", "_ending", "_heartbeat", "_launcher", "_layout"},
    "exchange": FOUNDATION | LEAVES | {"_at_exit", "_checks", "exchange", "topology"},
    "center": FOUNDATION
    | LEAVES
    | {"_center", "_checks", "_state", "center", "exchange", "topology"},
    "algorithms": ENGINE | {"algorithms", "schedules"},
    "shared": FOUNDATION | {"_at_exit", "_checks", "_layout", "exchange", "shared", "topology"},
    "passm": FOUNDATION | {"_checks", "_consensus", "_fragments", "algorithms", "passm", "shared"},
}
# These may import all of them, and each other.
TOP = {
    "__init__",
    "__main__",
    "_compare",
    "_predict",
    "_sbatch",
    "_sweep",
    "_tune",
    "_verify",
    "checkpoint",
    "report",
    "study",
    "testing",
}


def imports(path):
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            # "from jdaso import x" imports jdaso.x, if there is such a module.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def row(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if row(p) in ROWS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_rows_below_it(path):
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "jdaso":
            assert rest, "import the module, not the package"
            assert rest.partition(".")[0] in ROWS[row(path)], name


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if row(p) in ENGINE | {"algorithms", "passm", "schedules"}],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_algorithms_know_no_network(path):
    assert {name.partition(".")[0] for name in imports(path)}.isdisjoint({"mpi4py", "mpi4jax"})


def test_every_file_belongs_to_a_row():
    assert {row(p) for p in PACKAGE.rglob("*.py")} <= ROWS.keys() | TOP


def test_import_jdaso_imports_no_mpi():
    code = "import sys, jdaso; sys.exit(any(m in sys.modules for m in ('mpi4py', 'mpi4jax')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_jdaso_imports_nothing_of_the_studies():
    names = {"sklearn", "matplotlib", "PIL", "jdaso.study"}
    code = f"import sys, jdaso; sys.exit(bool(sys.modules.keys() & {names}))"
    subprocess.run([sys.executable, "-c", code], check=True)
