"""Detecting the launcher, explaining a launch that MPI missed, and killing launchers that stay."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso import JdasoError
from jdaso.cluster import launchers
from jdaso.cluster.launchers import (
    LAUNCHERS,
    Launch,
    Launcher,
    detect_launch,
    explain_single_process,
    missing_srun,
    missing_variables,
)

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
BATCH_SHELL = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
HYDRA = {"PMI_SIZE": "8", "PMI_FD": "9", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "x", "PMIX_RANK": "3"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (1, "none", "")),
        (BATCH_SHELL, (1, "none", "")),
        (STEP, (4, "srun", "none")),
        (STEP | {"SLURM_MPI_TYPE": "none"}, (4, "srun", "none")),
        (STEP | {"PMI_FD": "9", "PMI_SIZE": "4"}, (4, "srun", "pmi2")),
        (STEP | {"PMIX_NAMESPACE": "x", "SLURM_MPI_TYPE": "pmix_v4"}, (4, "srun", "pmix")),
        (STEP | {"SLURM_MPI_TYPE": "cray_shasta"}, (4, "srun", "cray_shasta")),
        (HYDRA, (8, "mpiexec", "MPICH")),
        (MPIRUN, (8, "mpiexec", "Open MPI")),
        ({"PMI_SIZE": "8"}, (8, "mpiexec", "")),
        ({"MPI_LOCALNRANKS": "2"}, (2, "mpiexec", "")),
    ],
)
def test_launchers(environ, expected):
    processes, launcher = detect_launch(environ)
    assert (processes, launcher.name, launcher.manager) == expected
    if expected[2] in ("MPICH", "Open MPI", "pmi2", "pmix"):
        assert launcher in LAUNCHERS


@pytest.mark.parametrize("own", [HYDRA, MPIRUN])
def test_mpiexec_that_srun_helps_to_start(own):
    """In a job, mpiexec starts one helper per node with srun, and the helpers start the ranks."""
    assert detect_launch(STEP | own).processes == 8
    assert detect_launch(STEP | own).launcher.name == "mpiexec"


@pytest.mark.parametrize(
    ("launch", "library", "parts"),
    [
        (("srun", "none"), "MPICH Version: 5.0.2", ["--mpi=none", "use srun --mpi=pmi2"]),
        (("srun", "pmix"), "MPICH Version: 4.0.2", ["--mpi=pmix", "use srun --mpi=pmi2"]),
        (("srun", "none"), "Open MPI v5.0.8", ["--mpi=none", "use srun --mpi=pmix"]),
        (("srun", "pmi2"), "Open MPI v5.0.8", ["--mpi=pmi2", "use srun --mpi=pmix"]),
        (
            ("srun", "pmix_v4"),
            "Open MPI v5.0.8",
            ["--mpi=pmix_v4 is the right plugin", "built without it"],
        ),
        (("mpiexec", "MPICH"), "Open MPI v5.0.8", ["of MPICH, does not match"]),
        (("mpiexec", "Open MPI"), "MPICH Version: 5.0.2", ["of Open MPI, does not match"]),
        (("mpiexec", ""), "MPICH Version: 5.0.2", ["The mpiexec that was used does not match"]),
    ],
)
def test_error_names_the_mismatch(monkeypatch, launch, library, parts):
    monkeypatch.setattr(socket, "gethostname", lambda: "host7")
    text = explain_single_process(Launch(4, Launcher(*launch)), library)
    for part in [f"{launch[0]} started 4 processes", "on host7", library, *parts]:
        assert part in text


def test_program_that_was_not_started_with_srun():
    assert "only process of a Slurm job of 4 tasks" in missing_srun(BATCH_SHELL)
    assert "of 2 tasks" in missing_srun({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
    assert missing_srun({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}) is None
    assert missing_srun({"SLURM_NTASKS": "4"}) is None
    assert missing_srun({}) is None
    assert missing_srun(STEP) is None
    assert missing_srun(BATCH_SHELL | HYDRA) is None


PMI2 = STEP | {"PMI_FD": "10", "PMI_SIZE": "4"}


OFI = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}


@pytest.mark.parametrize(
    ("environ", "mpich", "expected"),
    [
        (PMI2, "5.0.2", OFI),
        (PMI2, "5.1.0", OFI),
        (PMI2, "4.3.2", {}),
        (PMI2, None, {}),
        (STEP, "5.0.2", {}),
        (PMI2 | HYDRA, "5.0.2", {}),
        (PMI2 | MPIRUN, "5.0.2", {}),
        (BATCH_SHELL, "5.0.2", {}),
        (PMI2 | {"MPIR_CVAR_CH4_NETMOD": "ucx"}, "5.0.2", {}),
        (PMI2 | {"FI_PROVIDER": "tcp"}, "5.0.2", {"MPIR_CVAR_CH4_NETMOD": "ofi"}),
    ],
)
def test_network_is_chosen_where_slurm_would_truncate_addresses(environ, mpich, expected):
    assert missing_variables(environ, mpich) == expected


@pytest.mark.parametrize("text", ["abc", "", "-1", "0", "4.0", " 4", "4\n", "1_0", "٣", "9" * 5000])
def test_invalid_number(text):
    with pytest.raises(JdasoError, match="SLURM_STEP_NUM_TASKS must be an integer") as error:
        detect_launch(STEP | {"SLURM_STEP_NUM_TASKS": text})
    assert f"got {text!r}" in str(error.value)
    with pytest.raises(JdasoError, match="SLURM_NTASKS must be an integer"):
        missing_srun(BATCH_SHELL | {"SLURM_NTASKS": text})


VARIABLES = [*STEP, *BATCH_SHELL, *HYDRA, *MPIRUN, "SLURM_MPI_TYPE", "SLURM_JOB_NUM_NODES"]


VALUES = st.text(max_size=6) | st.integers().map(str)


@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
def test_any_environment_is_accepted_or_an_error_names_the_variable(environ):
    message = None
    try:
        assert detect_launch(environ).processes >= 1
        missing_srun(environ)
    except JdasoError as error:
        message = str(error)
    if message is not None:
        (name,) = [v for v in environ if f"variable {v} must" in message]
        assert repr(environ[name]) in message


PROGRAM = Path(launchers.__file__)
WATCH = f"import sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); import launchers as it; "
TIMEOUT = 20.0


@pytest.fixture
def launcher(tmp_path):
    """Starts nested shells with the names of MPICH's launchers, which run a script."""
    for name in ("mpiexec", "hydra_pmi_proxy"):
        shutil.copy(shutil.which("bash"), tmp_path / name)
    started = []

    def start(script):
        inner = f"'{tmp_path}/hydra_pmi_proxy' -c \"$0\"; true"
        command = [tmp_path / "mpiexec", "-c", inner, script]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for job in started:
        for pid in [*launchers.descendants(job.pid), job.pid]:
            if launchers.process_info(pid) is not None:
                os.kill(pid, 9)
        job.wait()
        job.stdout.close()


def test_launchers_are_found_among_all_ancestors(launcher):
    names = f"{WATCH} print(*(p.name for p in it.find_launchers()))"
    job = launcher(f'sh -c \'"{sys.executable}" -c "$1"; true\' - "{names}"; true')
    assert job.communicate(timeout=TIMEOUT)[0].split() == ["hydra_pmi_proxy", "mpiexec"]


def test_without_a_launcher_nothing_is_started():
    assert launchers.find_launchers() == []


def test_launcher_that_waits_for_a_stopped_process_is_killed(launcher):
    stopped = "sleep 600 & kill -STOP $!; echo $!"
    job = launcher(f'{stopped}; "{sys.executable}" -c "{WATCH} it.start_watchdog()"; wait')
    pid = int(job.stdout.readline())
    assert job.wait(timeout=TIMEOUT) is not None
    assert launchers.process_info(pid) is None


def test_open_mpis_launcher_that_stays_is_killed(tmp_path):
    prterun = tmp_path / "prterun"
    shutil.copy(shutil.which("bash"), prterun)
    script = f'"{sys.executable}" -c "{WATCH} it.start_watchdog()"; sleep 600; true'
    with subprocess.Popen([prterun, "-c", script]) as job:
        try:
            job.wait(timeout=TIMEOUT)  # or TimeoutExpired
        finally:
            job.kill()


def test_a_process_with_a_name_of_other_bytes_disturbs_nothing(tmp_path):
    program = os.fsencode(tmp_path) + b"/\xff\xfe) ("
    shutil.copy(shutil.which("sleep"), program)
    with subprocess.Popen([program, "60"]) as stranger:
        try:
            assert stranger.pid in launchers.descendants(os.getpid())
        finally:
            stranger.kill()


def test_launcher_that_ends_is_left_alone(launcher):
    job = launcher(f'"{sys.executable}" -c "{WATCH} it.start_watchdog()"; exit 0')
    assert job.wait(timeout=TIMEOUT) == 0


def test_another_process_with_the_number_of_a_launcher_is_not_killed():
    bystander = subprocess.Popen(["sleep", "600"])
    try:
        start = launchers.process_info(bystander.pid).start
        words = [str(bystander.pid), str(start + 1)]
        subprocess.run([sys.executable, PROGRAM, *words], check=True, timeout=TIMEOUT)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize(
    ("library", "refused"),
    [
        ("MPICH Version: 5.0.2", True),
        ("Open MPI v5.0.8, package: Debian", False),
        ("IBM Spectrum MPI, 10.4.0", False),
        ("MVAPICH2 Version : 2.3.7", False),
        ("MPI VERSION : CRAY MPICH version 8.1.28", False),
        ("Intel(R) MPI Library 2021.11 for Linux* OS", False),
    ],
)
def test_only_a_library_that_cannot_talk_to_the_launcher_is_refused(library, refused):
    for environment in (MPIRUN, STEP | {"PMIX_NAMESPACE": "x"}):
        assert launchers.cannot_start(detect_launch(environment), library, "5.0.2") == refused


ENDS = """
import os, signal, sys
from jdaso.cluster import launchers

with launchers.said_after(float(sys.argv[1]), "still waits"):
    if sys.argv[2] == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.readline() if sys.argv[2] == "waits" else None
"""


@pytest.mark.parametrize(
    ("how", "said"), [("ends", ""), ("goes on", ""), ("waits", "still waits\n")]
)
def test_what_takes_long_is_said_while_the_process_lives(how, said):
    words = [sys.executable, "-c", ENDS, "0.5", how]
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        if how == "waits":
            assert process.stderr.readline() == said
            process.communicate("go on\n", timeout=TIMEOUT)
        else:  # until the other process has ended as well
            assert process.communicate(timeout=TIMEOUT)[1] == said
    finally:
        process.kill()
        process.wait()
