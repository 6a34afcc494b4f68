"""``python -m jdaso doctor``: what it prints, and what it says where something is wrong."""

import os
import sys

import pytest
from launch import mpiexec, passes, run

from jdaso import __main__

VIRTUAL = ("command.py", "doctor", "--devices", 2)
BEFORE = "import os, sys, jdaso.__main__ as main\nsys.argv[1:] = ['doctor']\n"


def alone(code: str, **env: str):
    """Runs the command as the only process, after some code."""
    program = f"{BEFORE}{code}\nmain.main()"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "SLURM", "MPI"))}
    environment = {**variables, "JAX_PLATFORMS": "cpu", **env}
    return run([sys.executable, "-c", program], environment, 60)


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_exchange_and_are_ready(processes):
    ended = mpiexec(processes, *VIRTUAL)
    passes(ended)
    for text in ("jdaso ", "Python ", "jax ", "launcher: mpiexec", "copies by compiled code"):
        assert ended.output.count(text) == 1
    for rank in range(processes):
        assert f"0:{processes} 1:{processes}" in ended.output.split(f"\n{rank} ")[1]
    said = f"an exchange between {processes} nodes has the bits that NumPy expects"
    assert ended.output.count(said) == 1
    assert ended.output.split("\n")[-2] == "ready"


def test_joined_processes_are_ready():
    ended = mpiexec(4, "command.py", "doctor", "--join-processes", "--processes-per-node", 2)
    passes(ended)
    assert "an exchange between 2 nodes has the bits" in ended.output


def test_a_process_alone_is_ready():
    ended = alone("")
    passes(ended)
    assert "one node: nothing to exchange with" in ended.output
    assert ended.output.split("\n")[-2] == "ready"


# what is wrong -> code that makes it so, and what the last line says
PROBLEMS = {
    "no mpi4py": ("sys.modules['mpi4py'] = None", "pip install mpich mpi4py"),
    "no compiled code": (
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *_: None if '_native' in name else find(name, *_)",
        "a C++17 compiler",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_to_do_is_the_last_line(problem):
    code, advice = PROBLEMS[problem]
    ended = alone(code)
    assert ended.returncode == 1
    last = ended.output.strip().split("\n")[-1]
    assert last.startswith("not ready: ")
    assert advice in last
    assert "Traceback" not in ended.output


def test_slurm_job_without_srun_is_not_ready():
    ended = alone("", SLURM_JOB_ID="1", SLURM_NTASKS="2")
    assert ended.returncode == 1
    assert ended.output.strip().split("\n")[-1].endswith("as python -m jdaso sbatch does.")


def test_hanging_mpi_ends_with_advice():
    """The interpreter's lock is held, as in MPI_Init, so no Python code can run."""
    hang = "import ctypes\nmain.discover_topology = lambda *_: ctypes.PyDLL(None).sleep(50)"
    ended = alone(f"main._LIMIT_SECONDS = 1\n{hang}")
    assert ended.returncode == 1
    assert "still waits after 1 s" in ended.output
    assert "launcher belongs to this MPI" in ended.output


def test_other_bits_are_not_ready(monkeypatch):
    """A mean whose last bit differs, of two nodes that one process plays."""

    class Two:
        num_nodes, rank, node, mesh = 2, 0, 0, None

        def describe(self, rank):
            return f"rank {rank} (host)"

    class Exchange:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def nearly(exchange, own):
        sent = __main__.np.random.default_rng(0).standard_normal((2, 4096), "float32")
        mean = (sent[0] + sent[1]) / 2
        mean.view("int32")[7] += 1
        return mean

    monkeypatch.setattr(__main__, "mpi_exchange", lambda *_, **__: Exchange())
    monkeypatch.setattr(__main__, "consensus", nearly)
    monkeypatch.setattr(__main__, "NamedSharding", lambda *_: None)
    with pytest.raises(__main__.JdasoError, match=r"1 of 4096 numbers that rank 0 \(host\)"):
        __main__.exchanged(Two())
