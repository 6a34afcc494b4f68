"""``python -m jdaso sbatch``: a job script for Slurm that saves at its time limit and goes on."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jdaso._checks import check_whole
from jdaso._interruption import EXIT_TRY_AGAIN

HELP = "write a job script for Slurm"
_MAX_SIGNAL = 65535  # Slurm's own
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+-]*")
_TIME = re.compile(r"(?P<days>[0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}")
_LIBRARIES = {"mpich": "pmi2", "openmpi": "pmix", "ompi": "pmix"}
_LAUNCHERS = ("mpiexec", "mpirun", "sbatch", "srun")

_HEAD = """\
# Submit it with: sbatch THIS_FILE [further arguments of the program]
# Written by:"""
_REQUEUE = f"""
# Failures since the job last ended by itself; after {{retries}} it is given up.
failures=slurm-$SLURM_JOB_ID.failures
case $status in
    {EXIT_TRY_AGAIN})  # a signal came, and all nodes have saved at the same step
        rm -f "$failures"
        scontrol requeue "$SLURM_JOB_ID"
        ;;
    0 | 1 | 2)  # done, or an error of the program, which would come again
        rm -f "$failures"
        ;;
    *)  # a process was killed, or its node was lost
        echo "$(date): status $status" >> "$failures"
        if [ "$(wc -l < "$failures")" -le {{retries}} ]; then
            scontrol requeue "$SLURM_JOB_ID"
        else
            echo "given up after {{retries}} retries, see $failures" >&2
        fi
        ;;
esac"""


class Job(NamedTuple):
    """What a job asks for; the names are those of sbatch's options.

    Attributes:
        nodes: how many.
        min_nodes: with how few the job may start, or start again when nodes are lost; None: with
            no fewer.
        time: limit of one run of the job, as sbatch reads it.
        command: the program and its arguments.
        ntasks_per_node: processes; 1, or as many as GPUs.
        gpus_per_node: 0 where there are none.
        cpus_per_task: cores of a process; None leaves it to Slurm.
        mpi: srun's plugin: pmi2 for MPICH and its relatives, pmix for Open MPI.
        signal: seconds before the time limit at which processes are told to save.
        requeue: whether the job starts again when it has saved, or was killed.
        retries: how often in a row it starts again after it was killed.
        job_name, partition, account: None leaves them to Slurm.
    """

    nodes: int
    time: str
    command: Sequence[str]
    min_nodes: int | None = None
    ntasks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    mpi: str = "pmi2"
    signal: int = 180
    requeue: bool = True
    retries: int = 3
    job_name: str | None = None
    partition: str | None = None
    account: str | None = None


def add_command(commands: Any) -> None:
    """Adds the subcommand to a parser."""
    parser = commands.add_parser(
        "sbatch",
        help=HELP,
        description="Writes a job script for Slurm. The program must save and end with status "
        f"{EXIT_TRY_AGAIN} at SIGUSR1, as examples/train.py does, and go on when started again. "
        "What is given to sbatch after the script is added to its arguments.",
        usage="%(prog)s --nodes N --time LIMIT [options] -- program [arguments] > job.sh",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    default, add = Job._field_defaults, parser.add_argument
    add("--nodes", type=int, required=True)
    add("--min-nodes", type=int, help="with how few it may start, or start again (as --nodes)")
    add("--time", required=True, help="limit of one run: 04:00:00, or 2-12 for days and hours")
    add("--ntasks-per-node", type=int, help="processes: 1 (default), or one for each GPU")
    add("--gpus-per-node", type=int)
    add("--cpus-per-task", type=int, help="cores of a process")
    add("--mpi", help=f"{default['mpi']} (default) for MPICH and its relatives, or pmix")
    add("--signal", type=int, help=f"seconds before the limit to save at ({default['signal']})")
    add("--requeue", action=argparse.BooleanOptionalAction, help="start it again, unless done")
    add("--retries", type=int, help=f"in a row, after it was killed ({default['retries']})")
    for name in ("--job-name", "--partition", "--account"):
        add(name)
    add("words", nargs="+", metavar="program", help="and its arguments, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the script."""
    options = vars(arguments) | {"command": arguments.words}
    try:
        given = {name: options[name] for name in Job._fields if name in options}
        print(script(Job(**given)), end="")
    except ValueError as error:
        raise SystemExit(f"jdaso sbatch: {error}") from error


def check(job: Job) -> None:
    """Raises ValueError, naming the option, for what Slurm would refuse or misunderstand."""
    for name in ("nodes", "ntasks_per_node", "signal"):
        check_whole(_option(name), getattr(job, name), 1)
    for name in ("gpus_per_node", "retries"):
        check_whole(_option(name), getattr(job, name), 0)
    if job.min_nodes is not None:
        check_whole("--min-nodes", job.min_nodes, 1)
        if job.min_nodes > job.nodes:
            raise ValueError(
                f"--min-nodes must be at most --nodes, {job.nodes}, got {job.min_nodes}."
            )
        if job.ntasks_per_node != 1:
            raise ValueError(
                "--min-nodes needs one process per node: from several Slurm concludes how many "
                f"nodes there are, and takes the fewest. Got {job.ntasks_per_node} of them."
            )
    if job.cpus_per_task is not None:
        check_whole("--cpus-per-task", job.cpus_per_task, 1)
    for name in ("mpi", "job_name", "partition", "account"):
        value = getattr(job, name)
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError(
                f"{_option(name)} must be of letters, digits and _ . , + -, got {value!r}."
            )
    if job.mpi in _LIBRARIES:
        raise ValueError(
            f"--mpi must be a plugin of srun, {_LIBRARIES[job.mpi]} for this library, got "
            f"{job.mpi!r}."
        )
    if job.mpi == "none":
        raise ValueError(
            "--mpi must not be none: every process would train alone. MPICH and its relatives "
            "need pmi2, Open MPI needs pmix; srun --mpi=list prints what there is."
        )
    if job.gpus_per_node and job.ntasks_per_node not in (1, job.gpus_per_node):
        raise ValueError(
            f"--ntasks-per-node must be 1 or the number of GPUs, {job.gpus_per_node}, got "
            f"{job.ntasks_per_node}: a process has all devices of its node, or one."
        )
    limit = seconds(job.time)
    if not job.signal < min(limit, _MAX_SIGNAL + 1):
        raise ValueError(
            f"--signal, {Job._field_defaults['signal']} if it is not given, must be less than the "
            f"time limit of {limit} s, and at most {_MAX_SIGNAL}, got {job.signal}."
        )
    if not job.requeue and job.retries != Job._field_defaults["retries"]:
        raise ValueError(f"--retries has no effect with --no-requeue, got {job.retries}.")
    words = [part for word in job.command for part in word.split("=")]
    if ("--on-failure", "shrink") in itertools.pairwise(words):
        raise ValueError(
            "--on-failure shrink needs mpirun --with-ft ulfm, and the script starts the program "
            "with srun, which ends all when one dies: use --min-nodes, with which the job starts "
            "again on the nodes that are left."
        )
    first = Path(job.command[0]).name if job.command else "-"
    if not first or first in _LAUNCHERS or first.startswith("-"):
        raise ValueError(
            "what comes after -- must be the program that each process runs, such as python "
            f"train.py, got {shlex.join(job.command)!r}; the script starts it with srun."
        )


def seconds(time: str) -> int:
    """A time limit as sbatch reads it.

    Raises:
        ValueError: unless it is one, of at least a minute.

    >>> [seconds(time) for time in ("30", "30:00", "0:30:00", "1-12", "1-12:00:00")]
    [1800, 1800, 1800, 129600, 129600]
    """
    match = _TIME.fullmatch(time)
    if match:
        days, fields = match["days"], [int(x) for x in time.split("-")[-1].split(":")]
        # Of one or two numbers the first counts minutes, but hours after days.
        units = (3600, 60, 1) if days or len(fields) == 3 else (60, 1)
        total = sum(x * unit for x, unit in zip(fields, units, strict=False))
        if (total := total + 86400 * int((days or "0-")[:-1])) >= 60:
            return total
    raise ValueError(
        "--time must be at least a minute: minutes, minutes:seconds, hours:minutes:seconds, "
        f"days-hours, days-hours:minutes or days-hours:minutes:seconds, got {time!r}."
    )


def script(job: Job) -> str:
    """A job script.

    Raises:
        ValueError: naming the option that cannot be.

    >>> text = script(Job(nodes=4, time="04:00:00", command=["python", "train.py", "--resume"]))
    >>> print(text.splitlines()[-1])
    exit "$status"
    """
    check(job)
    asked = {
        "job-name": job.job_name,
        "partition": job.partition,
        "account": job.account,
        "nodes": job.nodes if job.min_nodes is None else f"{job.min_nodes}-{job.nodes}",
        # Said of a job that may have fewer nodes, it would have the fewest; one is the default.
        "ntasks-per-node": job.ntasks_per_node if job.min_nodes is None else None,
        # With a process for each GPU, none may see those of the others: JAX would take them all.
        "gpus-per-node": job.gpus_per_node if job.ntasks_per_node == 1 else None,
        "gpus-per-task": 1 if job.gpus_per_node and job.ntasks_per_node > 1 else None,
        "cpus-per-task": job.cpus_per_task,
        "time": job.time,
        "signal": f"USR1@{job.signal}",
        "open-mode": "append",
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
    directives.append("#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue")
    srun = f"srun --kill-on-bad-exit=1 --mpi={job.mpi}"
    if job.cpus_per_task:
        srun += f" --cpus-per-task={job.cpus_per_task}"  # which srun does not take from above
    lines = [
        "#!/bin/bash",
        *_HEAD.splitlines(),
        *(f"#     {line}" for line in shlex.join(_written_by(job)).split("\n")),
        *directives,
        "",
        " \\\n    ".join([srun, *_lines(job.command), '"$@"']),
        "status=$?",
        *(_REQUEUE.format(retries=job.retries).splitlines() if job.requeue else ()),
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _written_by(job: Job) -> list[str]:
    """The command that writes a job's script."""
    words = ["python", "-m", "jdaso", "sbatch"]
    for name, value in job._asdict().items():
        if isinstance(value, bool):
            words += [] if value else [f"--no-{name}"]
        elif name != "command" and value != Job._field_defaults.get(name):
            words += [_option(name), str(value)]
    return [*words, "--", *job.command]


def _lines(command: Sequence[str]) -> list[str]:
    """A command for the shell, an option with its values on each line."""
    lines: list[list[str]] = []
    for word in command:
        if not lines or word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(words) for words in lines]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
