"""Fails the build if the API pages miss a public name, or document one that is not public."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

API = Path(__file__).parents[1] / "api"
DIRECTIVE = re.compile(r"^\.\. (?:auto(?:function|class|exception)|py:data):: (\S+)$", re.MULTILINE)
MODULES = (
    "center",
    "checkpoint",
    "cluster",
    "core",
    "exchange",
    "faults",
    "passm",
    "perf",
    "schedules",
)


def public_names() -> set[str]:
    """``jdaso.__all__`` and those of its modules, with dots."""
    jdaso = importlib.import_module("jdaso")
    names = {f"jdaso.{name}" for name in jdaso.__all__ if not inspect.ismodule(vars(jdaso)[name])}
    for module_name in MODULES:
        module = importlib.import_module(f"jdaso.{module_name}")
        names |= {f"jdaso.{module_name}.{name}" for name in _names_of(module)}
    # What a module and the top have in common is documented at the top.
    top = {id(vars(jdaso)[name.partition(".")[2]]) for name in names if name.count(".") == 1}
    return {name for name in names if name.count(".") == 1 or id(_resolve(name)) not in top}


def documented_names() -> list[str]:
    """The names that the pages of the folder ``api`` document."""
    return [
        name for page in sorted(API.glob("*.md")) for name in DIRECTIVE.findall(page.read_text())
    ]


def problems() -> list[str]:
    """A sentence for each public name that is not documented exactly once."""
    public, documented = public_names(), documented_names()
    found = [f"{name} is public and not documented in docs/api" for name in public - {*documented}]
    found += [f"{name} is documented and not public" for name in {*documented} - public]
    return found + [
        f"{name} is documented twice" for name in {*documented} if documented.count(name) > 1
    ]


def _names_of(module) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) == module.__name__ or name == "PHASES")
        and not (inspect.isclass(value) and name.endswith("State"))
    ]


def _resolve(name: str):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def setup(app):
    from sphinx.errors import ExtensionError

    def check(app):
        if found := problems():
            raise ExtensionError("\n".join(sorted(found)))

    app.connect("builder-inited", check)
    return {"parallel_read_safe": True}
