"""The examples that read from top to bottom run on two processes, and show that they learn."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from launch import BESIDE_PYTHON, run

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(script, *options, status=0, **env):
    """What an example prints when two processes run it."""
    path = os.pathsep.join([BESIDE_PYTHON, os.environ.get("PATH", "")])
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        pytest.skip("no mpiexec on PATH: pip install mpich")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PATH": path, **env}
    environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    command = [launcher, "-n", "2", sys.executable, str(EXAMPLES / script), *map(str, options)]
    ended = run(command, environment, timeout=300)
    assert ended.returncode == status, ended.output
    return ended.output


def test_minimal_learns_digits_from_both_shares():
    output = output_of("minimal.py")
    shares = re.findall(r"node (\d) of 2 has seen 704 images", output)
    accuracies = re.findall(r"Test accuracy of the mean: (.*)", output)
    assert sorted(shares) == ["0", "1"]
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) > 0.9
