"""Runs MPI jobs with a time limit. Nothing of a job remains when it has ended.

:func:`run` keeps what a job prints. :func:`watch` also records when, can hide deaths from the
launcher, runs jobs in the network lab, and counts the processes that outlive the launcher.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ORPHAN_SECONDS, CLEANUP_SECONDS = 5.0, 10.0
MARK = "JDASO_FAULTS"
# mpiexec may lie beside Python only.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
NO_MPIEXEC = "mpiexec is not on PATH: pip install mpich"
# Between mpiexec and a process, this shell hides the death of the process, as srun without -K does.
WHEN_IT_ENDS = "status=$?; echo exit status $status; [ $status = 137 ] && kill -STOP $$"
UNNOTICED = ["sh", "-c", f'"$@"; {WHEN_IT_ENDS}; exit $status', "-"]
# Lets mpiexec keep the other workers when one is killed, see docs/algorithms/center.md.
INDEPENDENT = ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "-"]


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
    launcher = ["mpiexec", "-n", str(processes)] if processes > 1 else []
    if launcher and shutil.which(launcher[0], path=PATH) is None:
        return Job("", "", NO_MPIEXEC)
    # The kernel ends the launcher, and with it the job, if this process dies.
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*tied, *launcher, sys.executable, *map(str, command)],
            env={**os.environ, "PATH": PATH, **root, **environment},
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


class Ended(NamedTuple):
    """A job that has ended.

    Attributes:
        status: Its exit status, or None if it was killed after its time limit.
        lines: The lines of its output, each with the time when it arrived.
        orphans: Number of processes that outlived the job.
    """

    status: int | None
    lines: list[tuple[float, str]]
    orphans: int

    def first(self, pattern: str) -> float | None:
        """The time of the first line that matches the pattern, or None."""
        return next((when for when, line in self.lines if re.search(pattern, line)), None)

    def numbers(self, pattern: str) -> list[int]:
        """The pattern's group in all of its matches. mpiexec may join two lines."""
        return [int(number) for _, line in self.lines for number in re.findall(pattern, line)]


def watch(
    program: list[str],
    processes: int,
    seconds: float,
    unnoticed: bool = False,
    in_lab: bool = False,
    independent: bool = False,
    per_node: int = 1,
    enough: Callable[[Ended], bool] = lambda job: False,
) -> Ended:
    """Runs ``python program`` as a job, and kills the processes that outlive it.

    Args:
        program: The program and its arguments.
        processes: Number of processes.
        seconds: Time limit.
        unnoticed: Whether the death of a process is hidden from the launcher.
        in_lab: Whether the processes run on hosts of the network lab.
        independent: Whether the others go on when a process dies. One that is stopped is continued
            when the first process has printed that it ended.
        per_node: Number of processes on each host of the lab.
        enough: Whether the job is to be killed now, by what it has printed so far.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, "PATH": PATH, MARK: mark, "JAX_PLATFORMS": "cpu"}
    job_command = [sys.executable, *program]
    if in_lab:
        nodes = processes // per_node
        command = [sys.executable, __file__, str(nodes), str(per_node), str(seconds), *job_command]
    else:
        mpiexec = shutil.which("mpiexec", path=PATH) or sys.exit(NO_MPIEXEC)
        options = ["-disable-auto-cleanup"] if independent else []
        shell = INDEPENDENT if independent else UNNOTICED if unnoticed else []
        command = [mpiexec, *options, "-n", str(processes), *shell, *job_command]
    lines: list[tuple[float, str]] = []
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def listen() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append((time.monotonic(), line.rstrip()))
            if independent and line.startswith("rank 0 ended"):
                for pid in marked(mark):
                    os.kill(pid, signal.SIGCONT)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    until = time.monotonic() + seconds
    try:
        while (status := job.poll()) is None and time.monotonic() < until:
            if enough(Ended(None, lines[:], 0)):
                break
            time.sleep(0.02)
        until = time.monotonic() + ORPHAN_SECONDS
        while status is not None and marked(mark) and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()
    listener.join(ORPHAN_SECONDS)
    ended = Ended(status, lines, len(left))
    if unnoticed and status is not None:
        # mpiexec may return the status of the shell whose process was killed.
        others = [own for own in ended.numbers(r"^exit status (\d+)") if own != 137]
        return ended._replace(status=next(iter(others), status))
    return ended


def marked(mark: str) -> list[int]:
    """The running processes of a job, found by a variable in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (
                (entry / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(entry.name))
    return found


def main(nodes: int, per_node: int, seconds: float, command: list[str]) -> int:
    """Runs a job on nodes of the network lab."""
    sys.path.insert(0, str(Path(__file__).parent / "lab"))
    import lab

    # End the job early enough to remove the network before this process is killed.
    limit = seconds - CLEANUP_SECONDS
    with lab.up(nodes) as cluster:
        job = cluster.run(command, processes_per_node=per_node, timeout=limit, capture=False)
        return job.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
