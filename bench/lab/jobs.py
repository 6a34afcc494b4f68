"""Jobs: programs that run on nodes with a time limit, and end together."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time

from needs import SEARCH

# The kernel kills the process when the thread that started it ends, even if that was by SIGKILL.
TIED_TO_THIS_PROCESS = ["setpriv", "--pdeathsig", "KILL"]


def finish(
    jobs: list[tuple[list[str], dict[str, str]]], timeout: float | None, capture: bool
) -> list[subprocess.CompletedProcess]:
    """Runs jobs at the same time. Kills all of them if one fails, or at the time limit."""
    processes, outputs = [], []
    deadline = None if timeout is None else time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        for command, environment in jobs:
            files = [None, None]
            if capture:  # files instead of pipes, which would have to be read during the job
                files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in files]
            outputs.append(files)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[1],
                start_new_session=True,
                env={**environment, "PATH": SEARCH},
            )
            processes.append(stack.enter_context(_ended(process)))
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(jobs[0][0], timeout, *map(_read, outputs[0]))
            time.sleep(0.02)
        for process in processes:
            end(process)
        return [
            subprocess.CompletedProcess(process.args, process.returncode, *map(_read, files))
            for process, files in zip(processes, outputs, strict=True)
        ]


@contextlib.contextmanager
def _ended(process: subprocess.Popen):
    """Ends the process at the end of the block."""
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Kills the outermost process of a job, with which all of its processes end."""
    process.kill()
    process.wait()


def _read(file) -> str | None:
    if file is None:
        return None
    file.seek(0)
    return file.read()
