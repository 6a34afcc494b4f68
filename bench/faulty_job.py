"""Runs jobs of faulty_training.py, records their output, and finds processes that outlive them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TRAINING = [sys.executable, str(HERE / "faulty_training.py")]
AROUND_CENTER = [sys.executable, str(HERE / "faulty_center.py")]
ORPHAN_SECONDS, CLEANUP_SECONDS = 5.0, 10.0
MARK = "JDASO_FAULTS"
WHEN_IT_ENDS = "status=$?; echo exit status $status; [ $status = 137 ] && kill -STOP $$"
UNNOTICED = ["sh", "-c", f'"$@"; {WHEN_IT_ENDS}; exit $status', "-"]
# Lets mpiexec keep the other workers when one is killed, see docs/algorithms/center.md.
INDEPENDENT = ["sh", "-c", 'trap "" USR1; "$@"; exit $?', "-"]


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


def run(
    arguments: list[str],
    processes: int,
    seconds: float,
    unnoticed: bool = False,
    in_lab: bool = False,
    around_center: bool = False,
) -> Ended:
    """Runs the training as a job, and kills the processes that outlive it.

    Args:
        arguments: Arguments of ``faulty_training.py`` or ``faulty_center.py``.
        processes: Number of processes.
        seconds: Time limit.
        unnoticed: Whether the death of a process is hidden from the launcher.
        in_lab: Whether each process runs on a host of its own in the network lab.
        around_center: Whether the processes are workers around a center. A worker that is stopped
            is continued when the first worker has ended.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "JAX_PLATFORMS": "cpu"}
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["PATH"] = path
    if in_lab:
        command = [sys.executable, __file__, str(processes), str(seconds), *arguments]
    else:
        mpiexec = shutil.which("mpiexec", path=path) or sys.exit(
            "mpiexec is not on PATH: pip install mpich"
        )
        command = [mpiexec, "-n", str(processes), *(UNNOTICED if unnoticed else []), *TRAINING]
        if around_center:
            options = ["-disable-auto-cleanup", "-n", str(processes)]
            command = [mpiexec, *options, *INDEPENDENT, *AROUND_CENTER]
        command += arguments
    lines: list[tuple[float, str]] = []
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )

    def listen() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append((time.monotonic(), line.rstrip()))
            if around_center and line.startswith("rank 0 ended"):
                for pid in marked(mark):
                    os.kill(pid, signal.SIGCONT)

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    status = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = job.wait(seconds)
            until = time.monotonic() + ORPHAN_SECONDS
            while marked(mark) and time.monotonic() < until:
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


def main(processes: int, seconds: float, arguments: list[str]) -> int:
    """Runs the job on nodes of the network lab."""
    sys.path.insert(0, str(HERE / "lab"))
    import lab

    with lab.up(nodes=processes) as cluster:
        job = [*TRAINING, *arguments]
        # End the job early enough to remove the network before this process is killed.
        return cluster.run(job, timeout=seconds - CLEANUP_SECONDS, capture=False).returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
