"""Kills the launchers of MPICH and Open MPI if they do not end by themselves after an abort.

In about one of a hundred aborts, MPICH's mpiexec misses the abort when another process is stopped.
It also waits forever for a host that it cannot reach. Open MPI's mpirun has been seen to stay when
several processes aborted at the same time. The launcher and its processes would then never end.
So the process that aborts starts this file as a separate program:

    python kill_launcher.py PID START [PID START ...]      launchers, the nearest first

It imports only the standard library, and nothing of jdaso.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

# Time for a launcher to end by itself, which takes seconds on a busy machine, and time for killed
# processes to disappear.
_GRACE_SECONDS, _KILL_SECONDS, _POLL_SECONDS = 10.0, 1.0, 0.1
# Beginnings of names. In MPICH, a proxy starts the processes of its host, and mpiexec the proxies.
# In Open MPI, mpirun is called prterun; it starts the processes of its host, and prted on others.
_NEAREST, _OUTER = ("hydra_", "prterun", "prted", "mpirun"), ("mpiexec", "mpirun")


class ProcessInfo(NamedTuple):
    """A running process. The start time tells it from a later one with the same number."""

    pid: int
    start: int
    parent: int
    name: str


def process_info(pid: int) -> ProcessInfo | None:
    """Reads a process's entry in /proc; None if the process has ended."""
    try:
        # A name may contain any bytes.
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rsplit(")", 1)[1].split()
    if fields[0] == "Z":
        return None
    return ProcessInfo(pid, int(fields[19]), int(fields[1]), name)


def find_launchers() -> list[ProcessInfo]:
    """The launchers among this process's ancestors, the one of this host first."""
    found: list[ProcessInfo] = []
    # In a container, /proc may belong to another namespace, where the numbers mean others.
    own = Path("/proc/self").is_symlink() and os.readlink("/proc/self") == str(os.getpid())
    process = process_info(os.getpid()) if own else None
    while process is not None and process.parent > 1 and len(found) < 2:
        process = process_info(process.parent)
        if process is not None and process.name.startswith(_OUTER if found else _NEAREST):
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


def descendants(pid: int) -> list[int]:
    """The numbers of all children, grandchildren and so on of a process."""
    every = [process_info(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()]
    below, found = {pid}, []
    while new := [p.pid for p in every if p and p.parent in below and p.pid not in below]:
        below.update(new)
        found += new
    return found


def main(arguments: list[str]) -> None:
    """Waits for the launchers, then kills the descendants of the nearest one, then them."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    launchers = [(int(pid), int(start)) for pid, start in pairs]

    def alive() -> list[int]:
        return [pid for pid, start in launchers if (it := process_info(pid)) and it.start == start]

    def wait(seconds: float) -> bool:
        """Whether all launchers have ended within this time."""
        deadline = time.monotonic() + seconds
        while alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    if wait(_GRACE_SECONDS):
        return
    nearest = launchers[0][0]
    for victims in (lambda: descendants(nearest) if nearest in alive() else [], alive):
        for pid in victims():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if wait(_KILL_SECONDS):
            return


if __name__ == "__main__":
    main(sys.argv[1:])
