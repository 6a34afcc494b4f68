"""The launchers that jdaso knows, in one table, and what follows from it.

A row of the table says how a launcher is recognized, how it starts a program, which of its
processes manage a job, and how a job ends under it. To add a launcher, add a row, and a line below
the table wherever the launcher is an exception.

If the launcher and the MPI library do not match, every process gets an MPI world of its own. Each
would train alone, without an error. The launcher's environment variables reveal this.

An abort also starts this file as a program of its own, which kills launchers that do not end:

    python launchers.py PID START [PID START ...]      launchers, the nearest first

Therefore its imports at the top are of the standard library only.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple


class Launcher(NamedTuple):
    """A launcher, and what connects the processes that it starts.

    Attributes:
        name: The command; "none" if there is no launcher.
        manager: The MPI library that an mpiexec belongs to, or the MPI plugin of srun (``--mpi``);
            empty if it is unknown.
        variables: The environment variables that all processes of the launcher have. The first one
            holds the number of processes.
        start: The words that start a program, before it, with ``{processes}`` and ``{manager}``.
        on_host: Beginnings of the names of the process that starts the processes of a host.
        above: Beginnings of the names of the process that starts that one.
        exits: Whether all processes end an aborted job by exiting, because MPI_Abort would hide
            their status.
    """

    name: str
    manager: str = ""
    variables: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    on_host: tuple[str, ...] = ()
    above: tuple[str, ...] = ()
    exits: bool = False

    def command(self, processes: int | None = None) -> list[str]:
        """Returns the words that start a program; the program and its arguments follow them.

        >>> MPIEXEC.command(processes=2), SRUN._replace(manager="pmix").command()
        (['mpiexec', '-n', '2'], ['srun', '--kill-on-bad-exit=1', '--mpi=pmix'])
        """
        return [word.format(processes=processes, manager=self.manager) for word in self.start]


NO_LAUNCHER = Launcher("none")
MPIEXEC = Launcher("mpiexec", start=("mpiexec", "-n", "{processes}"), above=("mpiexec", "mpirun"))
# All three variables, because a batch shell has variables of the job, but is not one of its tasks.
SRUN = Launcher(
    "srun",
    variables=("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "SLURM_PROCID"),
    start=("srun", "--kill-on-bad-exit=1", "--mpi={manager}"),
)
#: A process belongs to the first row whose variables it has. Inside a Slurm job, mpiexec starts its
#: helpers with srun, and srun's variables count the helpers. So the rows of mpiexec come first.
LAUNCHERS = (
    # mpirun is called prterun. It starts the processes of its host, and prted those of other hosts.
    MPIEXEC._replace(
        manager="Open MPI",
        variables=("OMPI_COMM_WORLD_SIZE",),
        on_host=("prterun", "prted", "mpirun"),
    ),
    # A proxy starts the processes of its host, and mpiexec starts the proxies.
    MPIEXEC._replace(
        manager="MPICH", variables=("PMI_SIZE", "MPI_LOCALNRANKS"), on_host=("hydra_",)
    ),
    SRUN._replace(manager="pmix", variables=(*SRUN.variables, "PMIX_NAMESPACE")),
    # pmi2 has no status in its abort: it kills all processes, and srun reports 137.
    SRUN._replace(manager="pmi2", variables=(*SRUN.variables, "PMI_FD"), exits=True),
    SRUN,
    MPIEXEC._replace(variables=("PMI_SIZE",)),
    MPIEXEC._replace(variables=("MPI_LOCALNRANKS",)),
)

#: The plugin of srun that each MPI library requires, by the names that users give the library.
PLUGINS = {"mpich": "pmi2", "openmpi": "pmix", "ompi": "pmix"}

_CHECK = "Check it with: python -m jdaso doctor"
# The variables that hold the rank of a process.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_LATE_SECONDS = 5
_COUNT = re.compile(r"[0-9]{1,9}")
# The time that a launcher has to end by itself, which takes seconds on a busy machine, and the time
# in which killed processes disappear.
_GRACE_SECONDS, _KILL_SECONDS, _POLL_SECONDS = 10.0, 1.0, 0.1


class Launch(NamedTuple):
    """How a process was launched."""

    processes: int  # that the launcher started, including this one
    launcher: Launcher


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Detects the launcher of this process from its environment variables.

    Raises:
        JdasoError: If a variable that must hold a number does not.

    >>> launch = detect_launch({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"})
    >>> launch.processes, launch.launcher.name, launch.launcher.manager
    (4, 'mpiexec', 'MPICH')
    >>> detect_launch({}).launcher.name
    'none'
    """
    for launcher in LAUNCHERS:
        if all(variable in environ for variable in launcher.variables):
            if launcher == SRUN:
                launcher = SRUN._replace(manager=environ.get("SLURM_MPI_TYPE") or "none")
            return Launch(_count(environ, launcher.variables[0]), launcher)
    return Launch(1, NO_LAUNCHER)


def missing_variables(environ: Mapping[str, str], mpich: str | None) -> dict[str, str]:
    """Returns environment variables that must be set, or else MPI_Init may hang.

    MPICH 5.0 with UCX passes a node's address to Slurm's pmi2 together with the memory behind it,
    4096 bytes in lines of text. The fewer of these bytes are zero, the longer the lines are. Slurm
    reads 1024 characters of a line, and MPI_Init waits forever if a line is longer. OFI, the other
    network of pip's MPICH, has short addresses. Among OFI's providers it would prefer sockets,
    which is no longer maintained, to tcp. ``mpich`` is the version that pip has installed, or None.

    >>> srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
    >>> missing_variables({**srun, "PMI_FD": "10"}, mpich="5.0.2")
    {'MPIR_CVAR_CH4_NETMOD': 'ofi', 'FI_PROVIDER': '^sockets'}
    """
    launcher = detect_launch(environ).launcher
    affected = launcher[:2] == ("srun", "pmi2") and int((mpich or "0").split(".")[0]) > 4
    if not affected or "MPIR_CVAR_CH4_NETMOD" in environ:
        return {}
    required = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
    return {name: value for name, value in required.items() if name not in environ}


def cannot_start(launch: Launch, library: str, mpich: str | None) -> bool:
    """Whether MPI_Init would end the process, because the library cannot talk to the launcher.

    Both of Open MPI's mpiexec and ``srun --mpi=pmix`` speak PMIx, which pip's MPICH does not. Other
    libraries that have the same variables, such as Spectrum MPI, do.

    >>> launch = Launch(4, Launcher("srun", "pmix"))
    >>> cannot_start(launch, "MPICH Version: 5.0.2", "5.0.2"), cannot_start(launch, "Open MPI", "5")
    (True, False)
    """
    manager = launch.launcher.manager
    speaks_pmix = manager == "Open MPI" or (manager.startswith("pmix") and mpich is not None)
    return speaks_pmix and library.startswith("MPICH")


def explain_single_process(launch: Launch, library: str) -> str:
    """Returns the error for several launched processes that MPI on this host cannot connect."""
    name, manager, *_ = launch.launcher
    problem = (
        f"{name} started {launch.processes} processes, but the MPI on {socket.gethostname()} "
        "cannot connect this one with the others. "
    )
    matching = f"the mpiexec of this MPI ({library})"
    if name != "srun":
        owner = f", of {manager}," if manager else ""
        return f"{problem}The mpiexec that was used{owner} does not match: use {matching}. {_CHECK}"
    plugin = PLUGINS["openmpi" if "Open MPI" in library else "mpich"]
    if manager.split("_")[0] == plugin:
        return (
            f"{problem}srun --mpi={manager} is the right plugin, but {library} was built "
            "without it, or with another version of it. Install an MPI that was built for this "
            f"Slurm, or use {matching}. {_CHECK}"
        )
    return (
        f"{problem}srun used the plugin --mpi={manager}, but {library} requires {plugin}: "
        f"use srun --mpi={plugin}, or {matching}. (srun --mpi=list prints the plugins of this "
        f"Slurm. MPICH and its derivatives require pmi2, Open MPI requires pmix.) {_CHECK}"
    )


@contextlib.contextmanager
def said_after(seconds: float, text: str) -> Iterator[None]:
    """Says a text if the block takes longer, also while it holds the interpreter's lock.

    Therefore another process says it. It ends with this one, which closes the pipe.
    """
    program = (
        f"import select, sys; select.select([0], [], [], {seconds})[0] or sys.exit(sys.argv[1])"
    )
    arguments = [sys.executable, "-I", "-S", "-c", program, text]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE):
        yield


def said_if_alone(environ: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
    """Says so if the block takes more than a few seconds, in which this process waits for others.

    MPI_Init waits for all processes and holds the interpreter's lock.
    """
    if (processes := detect_launch(environ).processes) == 1:
        return contextlib.nullcontext()
    rank = next((environ[x] for x in _RANKS if x in environ), "?")
    text = (
        f"jdaso: rank {rank} ({socket.gethostname()}) has been waiting in discover_topology for "
        f"{_LATE_SECONDS} s. Those of the {processes} processes that do not say this have not "
        "called it yet, or have not started. All processes must call it."
    )
    return said_after(_LATE_SECONDS, text)


def missing_srun(environ: Mapping[str, str]) -> str | None:
    """Returns a warning for a Slurm job of several tasks that srun did not start, or else None."""
    if "SLURM_JOB_ID" not in environ or detect_launch(environ).launcher != NO_LAUNCHER:
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
        from jdaso.core.types import JdasoError

        raise JdasoError(
            f"the environment variable {variable} must be an integer >= 1, got "
            f"{text!r}. Launchers set it: start the program with srun or mpiexec, or unset it."
        )
    return int(text)


# Killing launchers that stay. In about one of a hundred aborts, MPICH's mpiexec misses the abort
# when another process is stopped. It also waits forever for a host that it cannot reach. Open MPI's
# mpirun has been seen to stay when several processes aborted at the same time. The launcher and its
# processes would then never end.


class ProcessInfo(NamedTuple):
    """A running process. The start time tells it from a later one with the same number."""

    pid: int
    start: int
    parent: int
    name: str


def process_info(pid: int) -> ProcessInfo | None:
    """Reads a process's entry in /proc. Returns None if the process has ended."""
    try:
        # A name may contain any bytes.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rsplit(")", 1)[1].split()
    if fields[0] == "Z":
        return None
    return ProcessInfo(pid, int(fields[19]), int(fields[1]), name)


def descendants(pid: int) -> list[int]:
    """Returns the numbers of all children, grandchildren and so on of a process."""
    every = [process_info(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()]
    below, found = {pid}, []
    while new := [p.pid for p in every if p and p.parent in below and p.pid not in below]:
        below.update(new)
        found += new
    return found


def find_launchers() -> list[ProcessInfo]:
    """Returns the launchers among this process's ancestors, the one of this host first."""
    found: list[ProcessInfo] = []
    # In a container, /proc may belong to another namespace, where the numbers mean others.
    own = Path("/proc/self").is_symlink() and os.readlink("/proc/self") == str(os.getpid())
    process = process_info(os.getpid()) if own else None
    while process is not None and process.parent > 1 and len(found) < 2:
        process = process_info(process.parent)
        names = sum((row.above if found else row.on_host for row in LAUNCHERS), ())
        if process is not None and process.name.startswith(names):
            found.append(process)
    return found


def start_watchdog() -> None:
    """Starts this file as a program for the launchers of this process, if there are any."""
    arguments = [str(number) for it in find_launchers() for number in (it.pid, it.start)]
    if arguments:
        with contextlib.suppress(OSError):
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that the launcher does not end it with this process
            )


def main(arguments: list[str]) -> None:
    """Waits for the launchers, then kills the descendants of the nearest one, then them."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    launchers = [(int(pid), int(start)) for pid, start in pairs]

    def alive() -> list[int]:
        return [pid for pid, start in launchers if (it := process_info(pid)) and it.start == start]

    def all_end_within(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    if all_end_within(_GRACE_SECONDS):
        return
    nearest = launchers[0][0]
    for victims in (lambda: descendants(nearest) if nearest in alive() else [], alive):
        for pid in victims():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if all_end_within(_KILL_SECONDS):
            return


if __name__ == "__main__":
    main(sys.argv[1:])
