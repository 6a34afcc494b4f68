"""The commands of the Makefile work one after the other in one clone."""

import os
import subprocess
from pathlib import Path

import launch
import pytest

MINUTES = {"demo": 15, "demo-lm": 20, "docs": 10, "lint": 5, "test-fast": 30}


@pytest.mark.slow
@pytest.mark.processes
def test_the_commands_work_one_after_the_other_in_one_clone(tmp_path):
    """The clone is that of the last commit, and installs an environment of its own."""
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", Path(__file__).parents[1], clone], check=True)
    ours = ("JAX_", "JDASO_", "MAKE", "PYTEST_", "PYTHON", "XLA_")
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(ours)}
    for target, minutes in MINUTES.items():
        launch.passes(launch.run(["make", "-C", str(clone), target], environment, 60 * minutes))
