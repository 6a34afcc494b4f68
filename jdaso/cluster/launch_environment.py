"""Reads from the environment how a process was launched, and explains a launch that MPI missed.

If the launcher and the MPI library do not match, every process gets an MPI world of its own. Each
would train alone, without an error. The launcher's environment variables reveal this.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from jdaso.core.types import JdasoError

_STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_COUNT = re.compile(r"[0-9]{1,9}")


class Launch(NamedTuple):
    """How a process was launched."""

    processes: int  # that the launcher started, including this one
    launcher: str  # "srun", "mpiexec" or "none"
    plugin: str = ""  # of srun, its MPI plugin (--mpi); of mpiexec, the MPI that it belongs to


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Detects the launcher of this process from its environment variables.

    It raises JdasoError if a variable that must hold a number does not.

    >>> detect_launch({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"})
    Launch(processes=4, launcher='mpiexec', plugin='MPICH')
    >>> detect_launch({})
    Launch(processes=1, launcher='none', plugin='')
    """
    # Inside a Slurm job, mpiexec starts its helpers with srun, and srun's variables count the
    # helpers. So mpiexec's variables come first.
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Launch(_count(environ, "OMPI_COMM_WORLD_SIZE"), "mpiexec", "Open MPI")
    if "PMI_SIZE" in environ and "MPI_LOCALNRANKS" in environ:
        return Launch(_count(environ, "PMI_SIZE"), "mpiexec", "MPICH")
    # All of them, because a batch shell has variables of the job, but is not one of its tasks.
    if all(variable in environ for variable in _STEP):
        plugin = "pmi2" if "PMI_FD" in environ else environ.get("SLURM_MPI_TYPE") or "none"
        plugin = "pmix" if "PMIX_NAMESPACE" in environ else plugin
        return Launch(_count(environ, "SLURM_STEP_NUM_TASKS"), "srun", plugin)
    for variable in ("PMI_SIZE", "MPI_LOCALNRANKS"):
        if variable in environ:
            return Launch(_count(environ, variable), "mpiexec")
    return Launch(1, "none")


def missing_variables(environ: Mapping[str, str], mpich: str | None) -> dict[str, str]:
    """Environment variables that must be set, or else MPI_Init may hang.

    MPICH 5.0 with UCX passes a node's address to Slurm's pmi2 together with the memory behind it,
    4096 bytes in lines of text. The fewer of these bytes are zero, the longer the lines are. Slurm
    reads 1024 characters of a line, and MPI_Init waits forever if a line is longer. OFI, the other
    network of pip's MPICH, has short addresses. Among OFI's providers it would prefer sockets,
    which is no longer maintained, to tcp. ``mpich`` is the version that pip has installed, or None.

    >>> srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    >>> missing_variables({**srun, "PMI_FD": "10"}, mpich="5.0.2")
    {'MPIR_CVAR_CH4_NETMOD': 'ofi', 'FI_PROVIDER': '^sockets'}
    """
    _, launcher, plugin = detect_launch(environ)
    affected = launcher == "srun" and plugin == "pmi2" and int((mpich or "0").split(".")[0]) > 4
    if not affected or "MPIR_CVAR_CH4_NETMOD" in environ:
        return {}
    required = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
    return {name: value for name, value in required.items() if name not in environ}


def explain_single_process(launch: Launch, library: str, host: str) -> str:
    """Error message for several launched processes of which MPI sees only the one on ``host``."""
    problem = (
        f"{launch.launcher} started {launch.processes} processes, but MPI sees only this one, on "
        f"{host}. Each would train alone. "
    )
    matching = f"the mpiexec of this MPI ({library})"
    if launch.launcher != "srun":
        owner = f", of {launch.plugin}," if launch.plugin else ""
        return f"{problem}The mpiexec that was used{owner} does not match: use {matching}."
    plugin = "pmix" if "Open MPI" in library else "pmi2"
    if launch.plugin.split("_")[0] == plugin:
        return (
            f"{problem}srun --mpi={launch.plugin} is the right plugin, but {library} was built "
            "without it, or with another version of it. Install an MPI that was built for this "
            f"Slurm, or use {matching}."
        )
    return (
        f"{problem}srun used the plugin --mpi={launch.plugin}, but {library} requires {plugin}: "
        f"use srun --mpi={plugin}, or {matching}. (srun --mpi=list prints the plugins of this "
        "Slurm. MPICH and its derivatives require pmi2, Open MPI requires pmix.)"
    )


def missing_srun(environ: Mapping[str, str]) -> str | None:
    """Warning for a Slurm job of several tasks that srun did not start; None in other cases."""
    if "SLURM_JOB_ID" not in environ or detect_launch(environ).launcher != "none":
        return None
    variables = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")
    tasks = max([_count(environ, v) for v in variables if v in environ], default=1)
    if tasks == 1:
        return None
    return (
        f"this is the only process of a Slurm job of {tasks} tasks, because srun did not start it. "
        "It trains alone. Put srun before the program, as python -m jdaso sbatch does."
    )


def _count(environ: Mapping[str, str], variable: str) -> int:
    text = environ[variable]
    if not _COUNT.fullmatch(text) or int(text) < 1:
        raise JdasoError(
            f"the environment variable {variable} must be a whole number of at least 1, got "
            f"{text!r}. Launchers set it: start the program with srun or mpiexec, or unset it."
        )
    return int(text)
