"""What README and the documentation say is true: blocks run, names, links and files exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest

import jdaso

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "ext"))

import api_coverage  # noqa: E402
import bench_tables  # noqa: E402

FILES = [*pages.pages(), ROOT / "bench" / "README.md", ROOT / "examples" / "papers" / "README.md"]
NAME = re.compile(r"(?<![\w./~-])jdaso((?:\.[A-Za-z_]\w*)+)")
IMPORT = re.compile(r"^from (jdaso[\w.]*) import ([\w, ]+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]+))?\)")
TIMEOUT = 300


def id_of(path):
    return str(path.relative_to(ROOT))


def marked(page):
    slow = "<!--slow-->" in page.read_text()
    return pytest.param(page, id=id_of(page), marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("page", [marked(p) for p in pages.pages() if pages.blocks(p.read_text())])
def test_every_block_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if pages.devices(page.read_text()) is None:
        pages.execute(page)
        return
    program = [sys.executable, pages.__file__, str(page)]
    subprocess.run(program, check=True, timeout=TIMEOUT, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def test_a_block_that_prints_something_else_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('loss', 2.0)\n```\n\n```text\nloss 2.03\n```\n")
    pages.execute(page)
    page.write_text("```python\nprint('loss', 2.0)\n```\n\n```text\nloss 2.3\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:2 prints"):
        pages.execute(page)


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


@pytest.mark.parametrize("file", FILES, ids=id_of)
def test_names_resolve(file):
    assert [name for name in sorted(names(file.read_text())) if not resolves(name)] == []


def test_a_missing_name_is_found():
    assert names("`jdaso.daso` and\nfrom jdaso.faults import Kind, gone\n") == {
        "jdaso.daso",
        "jdaso.faults",
        "jdaso.faults.Kind",
        "jdaso.faults.gone",
    }
    assert resolves("jdaso.faults.Kind")
    assert not resolves("jdaso.faults.gone")


@pytest.mark.parametrize("file", FILES, ids=id_of)
def test_programs_of_commands_exist(file):
    paths = set(re.findall(r"(?:python|\()\s*((?:examples|bench)/[\w/]+\.\w+)", file.read_text()))
    assert [path for path in sorted(paths) if not (ROOT / path).is_file()] == []


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub and MyST make of the headings of a page."""
    return {anchor_of(title) for title in re.findall(r"^#+ +(.*)$", path.read_text(), re.MULTILINE)}


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("file", FILES, ids=id_of)
def test_links_lead_to_files_and_headings(file):
    text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.M | re.S)
    assert "[](" not in text, "GitHub shows nothing for a link without a text"
    for target, anchor in LINK.findall(text):
        path = file.parent / target if target else file
        assert path.exists(), f"{target} does not exist"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{target}#{anchor}"


def test_every_public_name_is_documented_once():
    assert sorted(api_coverage.problems()) == []


def test_an_undocumented_name_is_found(monkeypatch):
    monkeypatch.setattr(jdaso, "__all__", [*jdaso.__all__, "unheard_of"])
    monkeypatch.setattr(jdaso, "unheard_of", object(), raising=False)
    assert api_coverage.problems() == ["jdaso.unheard_of is public and not documented in docs/api"]


MEASURED = re.compile(r"^```\{measured\} (.*)\n(?::table: (\d+)\n)?```$", re.MULTILINE)


def test_tables_of_measured_exist():
    wanted = MEASURED.findall((ROOT / "docs" / "measured.md").read_text())
    assert wanted
    for title, number in wanted:
        assert bench_tables.rows(title, int(number or 1))
        command, _ = bench_tables.table(title, int(number or 1))
        # Not a command of jdaso, which the text may mention besides.
        assert re.match(r"(python|mpiexec|mpirun) .*(bench|examples)/|make demo", command), title
    assert bench_tables.machine()


def test_the_ten_figures_are_in_the_sections_that_they_link_to():
    intro, *parts = re.split(r"^## +(.*)$", bench_tables.BENCH.read_text(), flags=re.MULTILINE)
    sections = {anchor_of(title): body for title, body in zip(parts[::2], parts[1::2], strict=True)}
    rows = re.findall(r"^\| .*\| (.*) \| \[.*\]\(#(.*)\) \|$", intro, re.MULTILINE)
    assert len(rows) == 10
    for figures, anchor in rows:
        for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.])", figures):
            assert number in sections[anchor], f"{number} is not in the section {anchor}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
