"""Starts a child program on several MPI processes; a hanging one is killed, never waited for."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import fork_server
import pytest

CHILDREN = Path(__file__).parent / "children"
BESIDE_PYTHON = str(Path(sys.executable).parent)
JOB = "JDASO_TEST_JOB"  # variable by which compile_in_turn.py knows the processes of a job
_jobs = itertools.count()
#: What a child prints that was asleep for a minute, unless its job ends before.
OVERSLEPT = "slept for a whole minute"


class Ended(NamedTuple):
    """Exit status and everything a job printed."""

    returncode: int
    output: str


# mpiexec ends all processes at once when one is killed, before they can say a word; srun without
# -K does not. Here a shell stands between: it stops when its process was killed,
# and is killed itself when the others end, which mpiexec may take for the status of the job.
WHEN_IT_ENDS = "status=$?; echo exit status $status; [ $status = 137 ] && kill -STOP $$"
UNNOTICED = ["sh", "-c", f'"$@"; {WHEN_IT_ENDS}; exit $status', "-"]
# As the page of the center says: mpiexec lets the others live, but ends them when one prints after
# a death by a signal. A shell makes a status of that; mpiexec tells the others by SIGUSR1, which
# would end it.
OUTLIVED = ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "-"]


def mpiexec(
    processes: int,
    child: str,
    *arguments: object,
    timeout: float = 300,
    deaths_are_noticed: bool = True,
    survive: bool = False,
    forked: bool = True,
    **env: str,
):
    """Runs tests/support/children/<child> and returns how it ended.

    The job gets a process group of its own, which is killed when the time is over; the test then
    fails and shows what the job has printed until then. With ``survive`` a process that dies does
    not end the others. ``forked=False`` starts new processes, of which mpiexec is an ancestor.
    """
    path = os.pathsep.join([BESIDE_PYTHON, os.environ.get("PATH", "")])
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        pytest.skip("no mpiexec on PATH: pip install mpich")
    job = f"{os.getpid()}-{next(_jobs)}"
    environment = {**os.environ, "PATH": path, "JAX_PLATFORMS": "cpu", JOB: job, **env}
    options = ["-disable-auto-cleanup"] if survive else []
    between = OUTLIVED if survive else [] if deaths_are_noticed else UNNOTICED
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
    if open_mpi := "Open MPI" in version:
        if survive:
            pytest.skip("needs MPICH's launcher, which can let the others live")
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    python = [sys.executable]
    if forked and not open_mpi:
        python, variables = fork_server.command(env)
        environment |= variables
    program = [*between, *python, str(CHILDREN / child)]
    command = [launcher, *options, "-n", str(processes), *program]
    return run([*command, *map(str, arguments)], environment, timeout)


def run(command: list[str], environment: dict[str, str], timeout: float) -> Ended:
    """Runs a command in a process group of its own, for a limited time."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"still running after {timeout} s: {' '.join(command)}\n{output}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ended(process.returncode, output)


def passes(ended: Ended) -> None:
    """Asserts that every process of a job ended well; shows its output if not."""
    assert ended.returncode == 0, ended.output


def refuses(ended: Ended, texts: list[str]) -> None:
    """Asserts that a job ended with an error that says all texts, and waited for no process."""
    assert ended.returncode != 0, ended.output
    for text in texts:
        assert text in ended.output, f"{text!r} not in:\n{ended.output}"
    for waited in (OVERSLEPT, "Termination timeout"):  # the latter is of XLA, for a device
        assert waited not in ended.output, ended.output


class Batch:
    """Child programs that run in one job, when the first of their tests asks for a result.

    Args:
        processes: of the job.
        children: name -> (child, arguments...).
        raises: whether each child must raise on every process, instead of ending well.
        options: of :func:`mpiexec`.
    """

    def __init__(self, processes: int, children: dict[str, tuple], raises=False, **options):
        self.names = list(children)
        self._processes, self._options = processes, options
        self._children = [
            [name, child, list(map(str, arguments)), raises]
            for name, (child, *arguments) in children.items()
        ]
        self._ended: Ended | None = None

    def ended(self) -> Ended:
        """How the job ended; starts it at the first call."""
        if self._ended is None:
            program = json.dumps(self._children)
            options = {"timeout": 120 + 60 * len(self._children), **self._options}
            self._ended = mpiexec(self._processes, "batch.py", program, **options)
        return self._ended

    def passes(self, name: str) -> str:
        """Asserts that a child ended well on every process; returns what the job printed."""
        output = self.ended().output
        assert output.count(f"[{name}] passed") == self._processes, output
        return output

    def raised(self, name: str) -> str:
        """Asserts that a child raised on every process; returns the errors."""
        output = self.ended().output
        errors = [line for line in output.splitlines() if f"[{name}] raised" in line]
        assert len(errors) == self._processes, output
        return "\n".join(errors)
