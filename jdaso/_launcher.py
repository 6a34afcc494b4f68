"""What the environment says of the launcher, and what is wrong where MPI knows nothing of it.

A launcher that does not speak the language of the MPI library leaves every process in a world of
its own: each would train alone, without an error. Its environment variables tell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from jdaso._base import JdasoError

_STEP = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
_COUNT = re.compile(r"[0-9]{1,9}")


class Launch(NamedTuple):
    """How a process was started.

    Attributes:
        processes: how many the launcher has started, with this one.
        launcher: ``"srun"``, ``"mpiexec"`` or ``"nobody"``.
        plugin: how srun speaks to MPI, its ``--mpi``; for mpiexec, whose it is.
    """

    processes: int
    launcher: str
    plugin: str = ""


def launched(environ: Mapping[str, str]) -> Launch:
    """Who has started this process, together with how many others.

    Args:
        environ: the environment variables of the process.

    Raises:
        JdasoError: if a number among them is none.

    >>> launched({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"})
    Launch(processes=4, launcher='mpiexec', plugin='MPICH')
    >>> launched({})
    Launch(processes=1, launcher='nobody', plugin='')
    """
    # mpiexec inside a job starts its helpers with srun, whose variables count those: its own first.
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return Launch(_count(environ, "OMPI_COMM_WORLD_SIZE"), "mpiexec", "Open MPI")
    if "PMI_SIZE" in environ and "MPI_LOCALNRANKS" in environ:
        return Launch(_count(environ, "PMI_SIZE"), "mpiexec", "MPICH")
    # Only inside a step: a batch shell has the variables of the job, but is no task of it.
    if all(variable in environ for variable in _STEP):
        return Launch(_count(environ, "SLURM_STEP_NUM_TASKS"), "srun", _plugin(environ))
    for variable in ("PMI_SIZE", "MPI_LOCALNRANKS"):
        if variable in environ:
            return Launch(_count(environ, variable), "mpiexec")
    return Launch(1, "nobody")


def lacking(environ: Mapping[str, str], mpich: str | None) -> dict[str, str]:
    """Variables that the environment lacks, and without which MPI may not start.

    MPICH 5.0 with UCX tells Slurm's pmi2 a node's address with all that lies behind it in memory,
    4096 bytes in lines that are the longer the fewer of them are zero. Slurm reads 1024
    characters of a line, and where there are more, MPI_Init waits for ever. Addresses of OFI, the
    other network of pip's MPICH, are short; of OFI's providers it would choose sockets, which
    nobody keeps any more, before tcp.

    Args:
        environ: the environment variables of the process.
        mpich: version of MPICH that pip has installed; None if it has not.

    >>> srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    >>> lacking({**srun, "PMI_FD": "10"}, mpich="5.0.2")
    {'MPIR_CVAR_CH4_NETMOD': 'ofi', 'FI_PROVIDER': '^sockets'}
    """
    _, launcher, plugin = launched(environ)
    concerned = launcher == "srun" and plugin == "pmi2" and int((mpich or "0").split(".")[0]) > 4
    if not concerned or "MPIR_CVAR_CH4_NETMOD" in environ:
        return {}
    wanted = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
    return {name: value for name, value in wanted.items() if name not in environ}


def why_alone(launch: Launch, library: str, host: str) -> str:
    """What is wrong where several processes were started, but MPI sees only one.

    Args:
        launch: from :func:`launched`.
        library: name of the MPI library.
        host: of this process.
    """
    said = (
        f"{launch.launcher} started {launch.processes} processes, but MPI sees only this one, on "
        f"{host}; each would train alone. "
    )
    mine = f"the mpiexec of this MPI ({library})"
    if launch.launcher != "srun":
        whose = f" is that of {launch.plugin} and" if launch.plugin else ""
        return f"{said}The mpiexec that was used{whose} does not fit: use {mine}."
    plugin = "pmix" if "Open MPI" in library else "pmi2"
    if launch.plugin.split("_")[0] == plugin:
        return (
            f"{said}srun --mpi={launch.plugin} fits, but {library} was built without it, or with "
            f"another version: install an MPI that was built for this Slurm, or use {mine}."
        )
    return (
        f"{said}srun spoke to MPI with --mpi={launch.plugin}: use srun --mpi={plugin}, which "
        f"{library} needs, or {mine}. (srun --mpi=list prints what Slurm has: MPICH and its "
        "relatives need pmi2, Open MPI needs pmix.)"
    )


def forgotten(environ: Mapping[str, str]) -> str | None:
    """What is wrong in a Slurm job of several tasks whose program srun was not to start.

    Returns:
        A sentence for the shell of such a job; None anywhere else.
    """
    if "SLURM_JOB_ID" not in environ or launched(environ).launcher != "nobody":
        return None
    variables = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")
    tasks = max([_count(environ, v) for v in variables if v in environ], default=1)
    if tasks == 1:
        return None
    return (
        f"this is the only process of a Slurm job of {tasks} tasks, since srun did not start it; "
        "it trains alone. Put srun before the program, as python -m jdaso sbatch does."
    )


def _plugin(environ: Mapping[str, str]) -> str:
    if "PMIX_NAMESPACE" in environ:
        return "pmix"
    return "pmi2" if "PMI_FD" in environ else environ.get("SLURM_MPI_TYPE") or "none"


def _count(environ: Mapping[str, str], variable: str) -> int:
    text = environ[variable]
    if not _COUNT.fullmatch(text) or int(text) < 1:
        raise JdasoError(
            f"the environment variable {variable} must be a whole number of at least 1, got "
            f"{text!r}. Launchers set it: start the program with srun or mpiexec, or unset it."
        )
    return int(text)
