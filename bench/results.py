"""Results of trainings by their description, kept in a file, so that a script can be stopped."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


class Results:
    """The results of trainings, a line of JSON each.

    The last line is cut if the script was stopped while it wrote it. Such a line does not count.

    Args:
        path: the file, or None to keep nothing.
    """

    def __init__(self, path: Path | None):
        self._path: Path | None = path
        self._found: dict[str, list[Any]] = {}
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                key, outcome = json.loads(line)
                self._found[json.dumps(key)] = outcome

    def get(self, key: dict[str, Any]) -> list[Any] | None:
        """The result of a training that is described by ``key``."""
        return self._found.get(json.dumps(key))

    def add(self, key: dict[str, Any], outcome: list[Any]) -> None:
        """Appends a result to the file."""
        self._found[json.dumps(key)] = outcome
        if self._path is not None:
            with self._path.open("a") as file:
                file.write("\n" + json.dumps([key, outcome]))
