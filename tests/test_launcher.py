"""Who started a process, read from its environment, and what is wrong where MPI knows of nobody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso import JdasoError
from jdaso._launcher import Launch, forgotten, lacking, launched, why_alone

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
BATCH_SHELL = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
HYDRA = {"PMI_SIZE": "8", "PMI_FD": "9", "PMI_RANK": "3", "MPI_LOCALNRANKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_SIZE": "8", "PMIX_NAMESPACE": "x", "PMIX_RANK": "3"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch(1, "nobody")),
        (BATCH_SHELL, Launch(1, "nobody")),
        (STEP, Launch(4, "srun", "none")),
        (STEP | {"SLURM_MPI_TYPE": "none"}, Launch(4, "srun", "none")),
        (STEP | {"PMI_FD": "9", "PMI_SIZE": "4"}, Launch(4, "srun", "pmi2")),
        (STEP | {"PMIX_NAMESPACE": "x", "SLURM_MPI_TYPE": "pmix_v4"}, Launch(4, "srun", "pmix")),
        (STEP | {"SLURM_MPI_TYPE": "cray_shasta"}, Launch(4, "srun", "cray_shasta")),
        (HYDRA, Launch(8, "mpiexec", "MPICH")),
        (MPIRUN, Launch(8, "mpiexec", "Open MPI")),
        ({"PMI_SIZE": "8"}, Launch(8, "mpiexec")),
        ({"MPI_LOCALNRANKS": "2"}, Launch(2, "mpiexec")),
    ],
)
def test_launchers(environ, expected):
    assert launched(environ) == expected


@pytest.mark.parametrize("own", [HYDRA, MPIRUN])
def test_mpiexec_that_srun_helps_to_start(own):
    """In a job mpiexec starts one helper on each of four nodes with srun, and they the ranks."""
    assert launched(STEP | own).processes == 8
    assert launched(STEP | own).launcher == "mpiexec"


@pytest.mark.parametrize(
    ("launch", "library", "said"),
    [
        (("srun", "none"), "MPICH Version: 5.0.2", ["--mpi=none", "use srun --mpi=pmi2"]),
        (("srun", "pmix"), "MPICH Version: 4.0.2", ["--mpi=pmix", "use srun --mpi=pmi2"]),
        (("srun", "none"), "Open MPI v5.0.8", ["--mpi=none", "use srun --mpi=pmix"]),
        (("srun", "pmi2"), "Open MPI v5.0.8", ["--mpi=pmi2", "use srun --mpi=pmix"]),
        (("srun", "pmix_v4"), "Open MPI v5.0.8", ["--mpi=pmix_v4 fits", "built without it"]),
        (("mpiexec", "MPICH"), "Open MPI v5.0.8", ["is that of MPICH and does not fit"]),
        (("mpiexec", "Open MPI"), "MPICH Version: 5.0.2", ["is that of Open MPI and does"]),
        (("mpiexec", ""), "MPICH Version: 5.0.2", ["The mpiexec that was used does not fit"]),
    ],
)
def test_error_says_what_does_not_fit(launch, library, said):
    text = why_alone(Launch(4, *launch), library, "host7")
    for part in [f"{launch[0]} started 4 processes", "on host7", library, *said]:
        assert part in text


def test_program_that_srun_was_to_start():
    assert "only process of a Slurm job of 4 tasks" in forgotten(BATCH_SHELL)
    assert "of 2 tasks" in forgotten({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"})
    assert forgotten({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}) is None
    assert forgotten({"SLURM_NTASKS": "4"}) is None
    assert forgotten({}) is None
    assert forgotten(STEP) is None
    assert forgotten(BATCH_SHELL | HYDRA) is None


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
def test_network_is_chosen_where_slurm_would_cut_addresses(environ, mpich, expected):
    assert lacking(environ, mpich) == expected


@pytest.mark.parametrize("text", ["abc", "", "-1", "0", "4.0", " 4", "4\n", "1_0", "٣", "9" * 5000])
def test_number_that_is_none(text):
    with pytest.raises(JdasoError, match="SLURM_STEP_NUM_TASKS must be a whole number") as error:
        launched(STEP | {"SLURM_STEP_NUM_TASKS": text})
    assert f"got {text!r}" in str(error.value)
    with pytest.raises(JdasoError, match="SLURM_NTASKS must be a whole number"):
        forgotten(BATCH_SHELL | {"SLURM_NTASKS": text})


VARIABLES = [*STEP, *BATCH_SHELL, *HYDRA, *MPIRUN, "SLURM_MPI_TYPE", "SLURM_JOB_NUM_NODES"]


VALUES = st.text(max_size=6) | st.integers().map(str)


@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES))
def test_any_environment_is_understood_or_refused_by_name(environ):
    said = None
    try:
        assert launched(environ).processes >= 1
        forgotten(environ)
    except JdasoError as error:
        said = str(error)
    if said is not None:
        (name,) = [v for v in environ if f"variable {v} must" in said]
        assert repr(environ[name]) in said
