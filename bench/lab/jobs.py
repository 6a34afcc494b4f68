"""Jobs: programs that run on nodes, for a limited time, and end together."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time

from needs import SEARCH

# SIGKILL when the thread that started it ends: nothing stays behind even if that was by SIGKILL.
TIED_TO_THIS_PROCESS = ["setpriv", "--pdeathsig", "KILL"]


def finish(
    jobs: list[tuple[list[str], dict[str, str]]], timeout: float | None, capture: bool
) -> list[subprocess.CompletedProcess]:
    """Waits for jobs that run together; kills all if one fails or the time is over."""
    processes, outputs = [], []
    over = None if timeout is None else time.monotonic() + timeout
    with contextlib.ExitStack() as at_the_end:
        for command, environment in jobs:
            files = [None, None]
            if capture:  # files, not pipes: nobody needs to read while the job runs
                files = [at_the_end.enter_context(tempfile.TemporaryFile("w+")) for _ in files]
            outputs.append(files)
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=files[0],
                stderr=files[1],
                start_new_session=True,
                env={**environment, "PATH": SEARCH},
            )
            processes.append(at_the_end.enter_context(_ended(process)))
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if over is not None and time.monotonic() > over:
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
    """Ends a process however the block is left."""
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Kills a job's outermost process; the first inside dies with it, and the rest with that."""
    process.kill()
    process.wait()


def _read(file) -> str | None:
    if file is None:
        return None
    file.seek(0)
    return file.read()
