"""Measures who learns of the death or the silence of a process, and after how long.

    python bench/told.py [--processes 16] [--group 2]

The processes of a job connect their heartbeats in a tree, in which at most ``--group`` processes
report to another one, so that a few processes on one host make a tree of several levels. Then one
of them is killed, or stopped. The table has the number of the others that were told, and the
seconds until the first and the last of them knew.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

LIMIT = 200.0  # seconds of a job
# rank of the process, of 16 in groups of two, and the signal that it gets
CASES = {
    "a leaf is killed": (15, signal.SIGKILL),
    "a process that forwards heartbeats is killed": (1, signal.SIGKILL),
    "the first process is killed": (0, signal.SIGKILL),
    "a leaf is stopped": (15, signal.SIGSTOP),
    "a process that forwards heartbeats is stopped": (1, signal.SIGSTOP),
}


def child(group: int, victim: int, number: int) -> None:
    """A process of the job. Those that are told print when, and why."""
    import jdaso
    from jdaso.cluster import topology, tree

    told = threading.Event()

    def note(reason: str, *_: object) -> None:
        if not told.is_set():
            told.set()
            print(f"told {time.time():.3f} {reason}", flush=True)

    tree.GROUP, topology.abort = group, note  # instead of ending all processes
    job = jdaso.discover_topology()
    job.comm.Barrier()
    if job.rank == victim:
        print(f"hit {time.time():.3f}", flush=True)
        os.kill(os.getpid(), number)
    while not told.is_set():
        if victim in job.heartbeat.silent_ranks():
            note("silent")
        time.sleep(1e-3)
    time.sleep(LIMIT)


def measure(processes: int, group: int, victim: int, number: int) -> str:
    """The number of processes that were told, and the seconds until the first and last knew."""
    from faulty_job import UNNOTICED

    own = [sys.executable, __file__, "--child", str(group), str(victim), str(int(number))]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    job = subprocess.Popen(
        [
            shutil.which("mpiexec", path=path) or sys.exit("mpiexec is not on PATH"),
            "-n",
            str(processes),
            *UNNOTICED,
            *own,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PATH": path},
    )
    timer = threading.Timer(LIMIT, lambda: os.killpg(job.pid, signal.SIGKILL))
    timer.start()
    hit, told = 0.0, []
    assert job.stdout is not None
    try:
        for line in job.stdout:
            kind, *rest = line.split()
            if kind == "hit":
                hit = float(rest[0])
            elif kind == "told":
                told.append(float(rest[0]))
                if len(told) == processes - 1:
                    break
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    if not told:
        return "0 | - | -"
    return f"{len(told)} | {min(told) - hit:.2f} | {max(told) - hit:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--child", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    from machine import machine

    print(machine())
    print("| fault | others told | first, s | last, s |\n|---|---|---|---|", flush=True)
    for name, (victim, number) in CASES.items():
        row = measure(options.processes, options.group, min(victim, options.processes - 1), number)
        print(f"| {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
