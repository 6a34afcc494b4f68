"""Ends a job whose launcher does not: a program of its own, started by a process that aborts.

MPICH's mpiexec overlooks one abort in a hundred when another process is stopped, and waits without
end for a host that it cannot reach. Processes and the launcher itself would stay for ever.

    python _last_resort.py PID START [PID START ...]      launchers, the nearest first

It imports nothing but the standard library, and nothing of jdaso.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

# So long a launcher may take for what it ends itself, and so long for what was killed here.
_PATIENCE_SECONDS, _CLEARING_SECONDS, _LOOK_SECONDS = 3.0, 1.0, 0.1
_PROXY, _LAUNCHER = "hydra_", "mpiexec"


class Running(NamedTuple):
    """A process: another one with the same number has started at another time."""

    pid: int
    start: int
    parent: int
    name: str


def running(pid: int) -> Running | None:
    """What /proc says of a process; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rsplit(")", 1)[1].split()
    if fields[0] == "Z":
        return None
    return Running(pid, int(fields[19]), int(fields[1]), name)


def launchers() -> list[Running]:
    """MPICH's launchers among the ancestors of this process: the one of its host, and mpiexec."""
    found: list[Running] = []
    # In a container, /proc may be that of another name space, and its numbers others' processes.
    own = Path("/proc/self").is_symlink() and os.readlink("/proc/self") == str(os.getpid())
    process = running(os.getpid()) if own else None
    while process is not None and process.parent > 1:
        process = running(process.parent)
        if process is not None and process.name.startswith(_LAUNCHER if found else _PROXY):
            found.append(process)
            if len(found) == 2:
                break
    return found


def watch() -> None:
    """Starts this program for the launchers of this process, if there are any."""
    words = [str(word) for it in launchers() for word in (it.pid, it.start)]
    if words:
        with contextlib.suppress(OSError):
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the launcher does not end it with this process
            )


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    every = [running(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()]
    below, found = {pid}, []
    while new := [p.pid for p in every if p and p.parent in below and p.pid not in below]:
        below.update(new)
        found += new
    return found


def main(words: list[str]) -> None:
    """Waits for the launchers, then kills what the nearest has started, then each of them."""
    left = [(int(pid), int(start)) for pid, start in zip(words[::2], words[1::2], strict=True)]

    def alive() -> list[int]:
        """Those that run; another process may have the number of one that has ended."""
        return [pid for pid, start in left if (it := running(pid)) and it.start == start]

    def wait(seconds: float) -> bool:
        """Whether all have ended within so long."""
        until = time.monotonic() + seconds
        while alive():
            if time.monotonic() > until:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    if wait(_PATIENCE_SECONDS):
        return
    nearest = left[0][0]
    for victims in (lambda: descendants(nearest) if nearest in alive() else [], alive):
        for pid in victims():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if wait(_CLEARING_SECONDS):
            return


if __name__ == "__main__":
    main(sys.argv[1:])
