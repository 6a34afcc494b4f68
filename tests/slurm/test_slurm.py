"""Jobs of a real Slurm: time limits, kills and restarts do not change the result of a training."""

import itertools
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm
from launch import BESIDE_PYTHON, CHILDREN
from saved import assert_same_run

from jdaso.cluster import sbatch

NODES = 2
TOTAL = 66  # steps of three epochs, of 2 x 2 x 16 of 1437 images
TRAINING = [sys.executable, CHILDREN / "training.py", "--save-every", 5, "--resume", "--epochs", 3]
TRAINING += ["--warmup-epochs", 1, "--cooldown-epochs", 1]
DOCTOR = [sys.executable, "-m", "jdaso", "doctor"]
# layout -> processes per node, and arguments of the program
LAYOUTS = {
    "one process per node": (1, ("--devices", 2)),
    "one process per device": (2, ("--devices", 1, "--join-processes")),
}


def job(command, **options):
    """A job script as ``python -m jdaso sbatch`` writes it."""
    given = {"nodes": NODES, "time": "10", "signal": 60, **options}
    return sbatch.job_script(sbatch.JobOptions(command=list(map(str, command)), **given))


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("mpi4py")
    if (problem := slurm.missing()) is not None:
        pytest.skip(problem)
    version = subprocess.run(
        [f"{BESIDE_PYTHON}/mpiexec", "--version"], capture_output=True, text=True
    )
    if "HYDRA" not in version.stdout:
        pytest.skip("Debian's Slurm provides pmi2, which requires MPICH: pip install mpich")
    with slurm.start(NODES) as cluster:
        yield cluster


# script of a program -> options of its job, final state of the job, and number of restarts
FIRST = '[ "${SLURM_RESTART_COUNT:-0}" = 0 ]'
ENDINGS = {
    f"{FIRST} && exit 75; exit 0": ({}, "COMPLETED", "1"),
    f"{FIRST} && kill -KILL $$; exit 0": ({}, "COMPLETED", "1"),
    "kill -KILL $$": ({"retries": 1}, "FAILED", "1"),
    "exit 75": ({"requeue": False}, "FAILED", "0"),
    "exit 1": ({}, "FAILED", "0"),
}


@pytest.fixture(scope="module")
def ended(cluster, tmp_path_factory):
    """What Slurm reports about jobs that have ended, by the script of their program."""
    jobs = {}
    for script, (options, *_) in ENDINGS.items():
        text = job(["sh", "-c", script], nodes=1, **options)
        jobs[script] = cluster.submit(text, tmp_path_factory.mktemp("job"))
    return {
        script: cluster.wait(number, *{state for _, state, _ in ENDINGS.values()}, timeout=90)
        for script, number in jobs.items()
    }


@pytest.mark.parametrize("script", ENDINGS)
def test_endings(ended, script):
    found = ended[script]
    assert (found["JobState"], found["Restarts"]) == ENDINGS[script][1:]


SAVES_ON_SIGTERM = [
    "sh",
    "-c",
    f"{FIRST} || exit 0; trap 'exit 75' TERM; echo begun; sleep 60 & wait",
]


def wait_until_begun(cluster, number, folder):
    cluster.wait(number, "RUNNING", timeout=30)
    log, deadline = folder / "job.log", time.monotonic() + 30
    while not log.exists() or "begun" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_job_that_is_cancelled_is_not_started_again(cluster, tmp_path):
    number = cluster.submit(job(SAVES_ON_SIGTERM), tmp_path)
    wait_until_begun(cluster, number, tmp_path)
    assert cluster.run("scancel", number).returncode == 0
    while cluster.run("squeue", "--noheader", "--job", number).stdout.strip():
        time.sleep(0.1)
    found = cluster.show(number)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")


def test_job_that_is_preempted_resumes_later(cluster, tmp_path):
    number = cluster.submit(job(SAVES_ON_SIGTERM, partition="low", cpus_per_task=4), tmp_path)
    wait_until_begun(cluster, number, tmp_path)
    done = cluster.run("srun", "--nodes=2", "--cpus-per-task=4", "hostname")
    assert done.returncode == 0, done.stdout
    assert cluster.wait(number, "COMPLETED", timeout=60)["Restarts"] == "1"


def test_job_whose_node_is_lost_resumes_on_another(cluster, tmp_path):
    """This uses a second cluster, because the node stays lost."""
    del cluster  # requested only to skip the test where there is no Slurm
    with slurm.start(2) as cluster:
        script = f"{FIRST} && hostname && echo begun && sleep 600; hostname"
        number = cluster.submit(job(["sh", "-c", script], nodes=1), tmp_path)
        wait_until_begun(cluster, number, tmp_path)
        cluster.fail(cluster.show(number)["NodeList"])
        assert cluster.wait(number, "COMPLETED", timeout=120)["Restarts"] == "1"
    log = (tmp_path / "job.log").read_text()
    assert sorted(re.findall(r"^node\d$", log, re.MULTILINE)) == ["node0", "node1"], log


def test_job_whose_node_is_lost_resumes_on_fewer(cluster, tmp_path):
    del cluster
    with slurm.start(2) as cluster:
        script = f"echo begun; {FIRST} && sleep 600; true"
        number = cluster.submit(job(["sh", "-c", script], min_nodes=1), tmp_path)
        wait_until_begun(cluster, number, tmp_path)
        assert cluster.show(number)["NumNodes"] == "2"
        cluster.fail("node1")
        found = cluster.wait(number, "COMPLETED", timeout=120)
        assert (found["Restarts"], found["NumNodes"]) == ("1", "1")


OWNER = """
import slurm, time

with slurm.start(1) as cluster:
    cluster.run("sbatch", "--output=/dev/null", "--wrap=sleep 600")
    print(cluster.folder, flush=True)
    time.sleep(600)
"""


def test_no_process_is_left_when_the_owner_is_killed(cluster):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(slurm.__file__).parent,
    )
    with owner:
        folder = owner.stdout.readline().strip()
        assert slurm.processes(folder)
        owner.kill()
    deadline = time.monotonic() + 10
    while slurm.processes(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    shutil.rmtree(folder)
    assert not slurm.processes(folder)
    assert cluster.run("sinfo").returncode == 0  # the other cluster is not affected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes_connect_to_each_other(cluster, layout):
    per_node, arguments = LAYOUTS[layout]
    # --quiet suppresses messages about waiting for nodes.
    options = ["--quiet", f"--nodes={NODES}", f"--ntasks-per-node={per_node}", "--mpi=pmi2"]
    command = [*DOCTOR, *arguments]
    done = cluster.run("srun", *options, *command, timeout=120, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout
    found, table, exchange, ready = done.stdout.split("\n\n")
    assert "launcher: srun (pmi2)" in found
    assert exchange == f"an exchange between {NODES} nodes has the bits that NumPy expects"
    assert ready == "ready\n"
    rows = [line.split() for line in table.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        [str(rank), f"node{rank // per_node}", str(rank // per_node)]
        for rank in range(NODES * per_node)
    ]
    for row in rows:
        assert {group.split(":")[1] for group in row if re.fullmatch(r"\d:\d", group)} == {"2"}


# Fills free memory with bytes that are not zero. MPICH 5.0.2 with UCX hangs then in either layout.
FULL_MEMORY = """
import os, jdaso

used = [os.urandom(size).replace(b"\\0", b"1") for size in range(500, 9000, 8) for _ in range(3)]
used = used[::2]
print(jdaso.discover_topology().num_nodes)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mpi_starts_with_any_content_of_memory(cluster, layout):
    per_node, _ = LAYOUTS[layout]
    srun = ["srun", "--quiet", f"--nodes={NODES}", f"--ntasks-per-node={per_node}", "--mpi=pmi2"]
    done = cluster.run(*srun, sys.executable, "-c", FULL_MEMORY, timeout=120, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout
    assert done.stdout.split() == [str(NODES * per_node)] * NODES * per_node


def test_processes_that_would_train_alone_are_an_error(cluster):
    srun = ["srun", f"--nodes={NODES}", "--mpi=none"]
    done = cluster.run(*srun, *DOCTOR, timeout=120, JAX_PLATFORMS="cpu")
    assert done.returncode != 0
    assert done.stdout.count("srun started 2 processes, but the MPI on") == NODES
    assert "use srun --mpi=pmi2" in done.stdout


def test_missing_srun_is_an_error(cluster, tmp_path):
    script = f"#!/bin/bash\n#SBATCH --nodes={NODES}\n{shlex.join(DOCTOR)}\n"
    number = cluster.submit(script, tmp_path, JAX_PLATFORMS="cpu")
    cluster.wait(number, "FAILED", timeout=120)
    said = "not ready: this is the only process of a Slurm job of 2 tasks"
    assert said in (tmp_path / "job.log").read_text()


def submit(cluster, folder, layout, env=None, **options):
    """Submits a training that writes to ``folder/run``; returns the number of its job."""
    per_node, arguments = LAYOUTS[layout]
    text = job([*TRAINING, *arguments], ntasks_per_node=per_node, **options)
    out = ("--out", folder / "run")
    return cluster.submit(text, folder, *out, JAX_PLATFORMS="cpu", **(env or {}))


def finish(cluster, number, folder):
    """Waits until a training has finished; returns its number of restarts and its output."""
    found = cluster.wait(number, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", timeout=400)
    log = (folder / "job.log").read_text()
    assert found["JobState"] == "COMPLETED", log
    assert "test accuracy" in log
    assert not list(folder.glob("*.failures"))
    return int(found["Restarts"]), log


# What happens to a training -> options of its job
TRAININGS = {
    "straight": {},
    "limited": {"time": "2", "signal": 45, "env": {"PAUSE": "1.5"}},
    "killed": {"env": {"SIGNAL": "SIGKILL:000003_*/node_1_of_2:0"}},
}


@pytest.fixture(
    scope="module",
    params=[pytest.param("one process per node", marks=pytest.mark.slow), "one process per device"],
)
def trainings(cluster, tmp_path_factory, request):
    """Numbers and folders of the trainings of a layout, which run at the same time."""
    jobs = {}
    for name, options in TRAININGS.items():
        folder = tmp_path_factory.mktemp(name)
        jobs[name] = submit(cluster, folder, request.param, **options), folder
    return jobs


@pytest.fixture(scope="module")
def straight(cluster, trainings):
    """The folder of an undisturbed training."""
    number, folder = trainings["straight"]
    assert finish(cluster, number, folder)[0] == 0
    return folder / "run"


def test_training_whose_task_is_killed(cluster, trainings, straight):
    number, folder = trainings["killed"]
    restarts, log = finish(cluster, number, folder)
    assert restarts == 1, log
    # It is killed once the third checkpoint, of step 15, exists. A busy machine may do more steps.
    resumed = re.search(rf"resumed at step (\d+) of {TOTAL}, bit for bit", log)
    assert resumed, log
    assert 10 <= int(resumed[1]) < TOTAL
    assert_same_run(folder / "run", straight, TOTAL)


def test_training_that_reaches_its_time_limit(cluster, trainings, straight):
    """Slurm checks time limits twice a minute, so the signal arrives after 45 to 75 s."""
    number, folder = trainings["limited"]
    restarts, log = finish(cluster, number, folder)
    stopped = re.findall(rf"stopped by a signal and saved at step (\d+) of {TOTAL}", log)
    assert stopped
    # On a slow machine the job stops more than once. It may also reach a time limit while it
    # starts, or after its last step.
    assert restarts >= len(stopped)
    resumed = re.findall(rf"resumed at step (\d+) of {TOTAL}, bit for bit", log)
    steps = [step for step, _ in itertools.groupby(resumed)]
    assert steps in (stopped, [*stopped, str(TOTAL)])
    assert_same_run(folder / "run", straight, TOTAL)
