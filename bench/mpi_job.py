"""Runs measurements as MPI jobs with a time limit, and keeps what they print."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple


class Job(NamedTuple):
    """A job that has ended.

    Attributes:
        problem: what went wrong, in one line. None if nothing did.
    """

    stdout: str
    stderr: str
    problem: str | None


def run(processes: int, seconds: float, *command: object, **environment: str) -> Job:
    """Runs ``python command`` on MPI processes, and kills all of them at the time limit.

    One process is started without a launcher.
    """
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    launcher = ["mpiexec", "-n", str(processes)] if processes > 1 else []
    if launcher and shutil.which(launcher[0], path=path) is None:
        return Job("", "", "mpiexec is not on PATH: pip install mpich")
    # The kernel ends the launcher, and with it the job, if this process dies.
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*tied, *launcher, sys.executable, *map(str, command)],
            env={**os.environ, "PATH": path, **root, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0), errors.seek(0)
        stdout, stderr = out.read(), errors.read()
    problem = None
    if status is None:
        problem = f"did not end within {seconds:g} s"
    elif status != 0:
        problem = f"status {status}: {_message(stderr)}"
    return Job(stdout, stderr, problem)


def _message(stderr: str) -> str:
    """The line of an error output that most likely names the error."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    found = (errors or [line for line in lines if "rror" in line] or lines or ["no message"])[-1]
    return found.replace("|", "\\|")[:300]
