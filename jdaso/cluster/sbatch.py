"""``python -m jdaso sbatch`` writes a Slurm job script that saves at the time limit and resumes."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jdaso.cluster.ending import EXIT_TRY_AGAIN
from jdaso.cluster.launchers import LAUNCHERS, PLUGINS, SRUN
from jdaso.core.validation import check_whole

_MAX_SIGNAL = 65535  # Slurm's limit
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+-]*")
_TIME = re.compile(r"(?P<days>[0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}")
_STARTS_OTHERS = {"sbatch", "mpirun", *(launcher.name for launcher in LAUNCHERS)}

_REQUEUE = f"""
# Failures in a row. After {{retries}} retries the job is given up.
failures=slurm-$SLURM_JOB_ID.failures
case $status in
    {EXIT_TRY_AGAIN})  # a signal arrived, and all nodes have saved at the same step
        rm -f "$failures"
        scontrol requeue "$SLURM_JOB_ID"
        ;;
    0 | 1 | 2)  # finished, or an error of the program, which would occur again
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


class JobOptions(NamedTuple):
    """Options of a job. The names are those of sbatch's options; None is Slurm's default."""

    nodes: int
    time: str  # limit of one run of the job, in sbatch's syntax
    command: Sequence[str]  # the program and its arguments
    min_nodes: int | None = None  # the fewest nodes to start or restart with; None: ``nodes``
    ntasks_per_node: int = 1  # processes per node: 1, or the number of GPUs
    gpus_per_node: int = 0
    cpus_per_task: int | None = None  # cores per process
    mpi: str = "pmi2"  # srun's plugin: pmi2 for MPICH and its derivatives, pmix for Open MPI
    signal: int = 180  # seconds before the time limit at which Slurm sends the signal to save
    requeue: bool = True  # whether the job starts again after it has saved or was killed
    retries: int = 3  # restarts in a row after it was killed
    job_name: str | None = None
    partition: str | None = None
    account: str | None = None


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "sbatch",
        help="write a job script for Slurm",
        description="Writes a job script for Slurm. On SIGUSR1 the program must save and exit "
        f"with status {EXIT_TRY_AGAIN}, as examples/resnet50.py does. It must resume when started "
        "again. Arguments that sbatch gets after the script are passed on to the program.",
        usage="%(prog)s --nodes N --time LIMIT [options] -- program [arguments] > job.sh",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    default, add = JobOptions._field_defaults, parser.add_argument
    add("--nodes", type=int, required=True)
    add("--min-nodes", type=int, help="smallest number to start with (default: --nodes)")
    add("--time", required=True, help="time limit of one run: 04:00:00, or 2-12 (days-hours)")
    add("--ntasks-per-node", type=int, help="processes per node: 1 (default), or one per GPU")
    add("--gpus-per-node", type=int)
    add("--cpus-per-task", type=int, help="cores per process")
    add("--mpi", help=f"{default['mpi']} (default) for MPICH and its derivatives, or pmix")
    add("--signal", type=int, help=f"seconds before the limit to save at ({default['signal']})")
    add("--requeue", action=argparse.BooleanOptionalAction, help="start again unless finished")
    add("--retries", type=int, help=f"restarts in a row after kills ({default['retries']})")
    for name in ("--job-name", "--partition", "--account"):
        add(name)
    add("words", nargs="+", metavar="program", help="the program and its arguments, after --")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the job script. An option that is not valid ends the program with its error."""
    options = vars(arguments) | {"command": arguments.words}
    try:
        given = {name: options[name] for name in JobOptions._fields if name in options}
        print(job_script(JobOptions(**given)), end="")
    except ValueError as error:
        raise SystemExit(f"jdaso sbatch: {error}") from error


def check_options(job: JobOptions) -> None:
    """Raises ValueError for an option that Slurm would reject or misunderstand."""
    for name in ("nodes", "ntasks_per_node", "signal", "min_nodes", "cpus_per_task"):
        if getattr(job, name) is not None:
            check_whole(_option(name), getattr(job, name), 1)
    for name in ("gpus_per_node", "retries"):
        check_whole(_option(name), getattr(job, name), 0)
    if job.min_nodes is not None:
        if job.min_nodes > job.nodes:
            raise ValueError(
                f"--min-nodes must be at most --nodes ({job.nodes}), got {job.min_nodes}."
            )
        if job.ntasks_per_node != 1:
            raise ValueError(
                f"--min-nodes requires --ntasks-per-node 1, got {job.ntasks_per_node}: with "
                "several processes per node, Slurm always allocates the fewest nodes."
            )
    for name in ("mpi", "job_name", "partition", "account"):
        value = getattr(job, name)
        if value is not None and not _NAME.fullmatch(value):
            raise ValueError(
                f"{_option(name)} must consist of letters, digits and _ . , + -, got {value!r}."
            )
    if job.mpi in PLUGINS:
        raise ValueError(
            f"--mpi must be one of srun's plugins, got the MPI library {job.mpi!r}: use "
            f"{PLUGINS[job.mpi]}."
        )
    if job.mpi == "none":
        raise ValueError(
            "--mpi must not be none: every process would train alone. Use pmi2 for MPICH and its "
            "derivatives, pmix for Open MPI. srun --mpi=list prints the available plugins."
        )
    if job.gpus_per_node and job.ntasks_per_node not in (1, job.gpus_per_node):
        raise ValueError(
            f"--ntasks-per-node must be 1 or --gpus-per-node ({job.gpus_per_node}), got "
            f"{job.ntasks_per_node}: a process uses all devices of its node, or one."
        )
    limit = parse_time(job.time)
    if not job.signal < min(limit, _MAX_SIGNAL + 1):
        raise ValueError(
            f"--signal must be less than the time limit of {limit} s, and at most {_MAX_SIGNAL}, "
            f"got {job.signal} (default: {JobOptions._field_defaults['signal']})."
        )
    if not job.requeue and job.retries != JobOptions._field_defaults["retries"]:
        raise ValueError(f"remove --retries {job.retries}, which has no effect with --no-requeue.")
    first = Path(job.command[0]).name if job.command else "-"
    if not first or first in _STARTS_OTHERS or first.startswith("-"):
        raise ValueError(
            "the arguments after -- must be the program that each process runs, such as python "
            f"train.py, got {shlex.join(job.command)!r}. The script starts it with srun."
        )


def parse_time(time: str) -> int:
    """Converts a time limit in sbatch's syntax to seconds; ValueError if below one minute.

    >>> [parse_time(time) for time in ("30", "30:00", "0:30:00", "1-12", "1-12:00:00")]
    [1800, 1800, 1800, 129600, 129600]
    """
    if match := _TIME.fullmatch(time):
        days, fields = match["days"], [int(x) for x in time.split("-")[-1].split(":")]
        # Without days, the first of one or two numbers is minutes. After days, it is hours.
        units = (3600, 60, 1) if days or len(fields) == 3 else (60, 1)
        total = sum(x * unit for x, unit in zip(fields, units, strict=False))
        if (total := total + 86400 * int((days or "0-")[:-1])) >= 60:
            return total
    raise ValueError(
        "--time must be at least a minute: minutes, minutes:seconds, hours:minutes:seconds, "
        f"days-hours, days-hours:minutes or days-hours:minutes:seconds, got {time!r}."
    )


def job_script(job: JobOptions) -> str:
    """Returns the text of a job script, or raises ValueError if an option is not valid.

    >>> options = JobOptions(nodes=4, time="04:00:00", command=["python", "train.py", "--resume"])
    >>> print(job_script(options).splitlines()[-1])
    exit "$status"
    """
    check_options(job)
    requested = {
        "job-name": job.job_name,
        "partition": job.partition,
        "account": job.account,
        "nodes": job.nodes if job.min_nodes is None else f"{job.min_nodes}-{job.nodes}",
        # With this option and --min-nodes, Slurm would allocate the fewest nodes. 1 is the default.
        "ntasks-per-node": job.ntasks_per_node if job.min_nodes is None else None,
        # With a process per GPU, each must see only its own GPU, because JAX uses all that it sees.
        "gpus-per-node": job.gpus_per_node if job.ntasks_per_node == 1 else None,
        "gpus-per-task": 1 if job.gpus_per_node and job.ntasks_per_node > 1 else None,
        "cpus-per-task": job.cpus_per_task,
        "time": job.time,
        "signal": f"USR1@{job.signal}",
        "open-mode": "append",
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in requested.items() if value]
    directives.append("#SBATCH --requeue" if job.requeue else "#SBATCH --no-requeue")
    srun = " ".join(SRUN._replace(manager=job.mpi).command())
    if job.cpus_per_task:
        srun += f" --cpus-per-task={job.cpus_per_task}"  # srun ignores the directive
    lines = [
        "#!/bin/bash",
        "# Submit it with: sbatch THIS_FILE [further arguments of the program]",
        "# Written by:",
        *(f"#     {line}" for line in shlex.join(_written_by(job)).split("\n")),
        *directives,
        "",
        " \\\n    ".join([srun, *_lines(job.command), '"$@"']),
        "status=$?",
        *([_REQUEUE.format(retries=job.retries)] if job.requeue else ()),
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _written_by(job: JobOptions) -> list[str]:
    """Returns the command line that writes this job script."""
    words = ["python", "-m", "jdaso", "sbatch"]
    for name, value in job._asdict().items():
        if isinstance(value, bool):
            words += [] if value else [f"--no-{name}"]
        elif name != "command" and value != JobOptions._field_defaults.get(name):
            words += [_option(name), str(value)]
    return [*words, "--", *job.command]


def _lines(command: Sequence[str]) -> list[str]:
    """Returns the lines of a shell command, one for each option with its values."""
    lines: list[list[str]] = []
    for word in command:
        if not lines or word.startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(word))
    return [" ".join(words) for words in lines]


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
