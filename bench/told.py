"""Measures who learns of the death or the silence of a process, and after how long.

    python bench/told.py [--processes 16] [--group 2]

The processes of a job connect their heartbeats in a tree, in which at most ``--group`` processes
report to another one, so that a few processes on one host make a tree of several levels. Then one
of them is killed, or stopped. The table has the number of the others that were told, and the
seconds until the first and the last of them knew.

In the last row, the processes run on eight hosts of the network lab, and the link of the last host
is cut. Without root, or another thing that the lab needs, the row says what is missing.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 200.0  # seconds of a job
# rank of the process, of 16 in groups of two, and the signal that it gets
CASES = {
    "a leaf is killed": (15, signal.SIGKILL),
    "a process that forwards heartbeats is killed": (1, signal.SIGKILL),
    "the first process is killed": (0, signal.SIGKILL),
    "a leaf is stopped": (15, signal.SIGSTOP),
    "a process that forwards heartbeats is stopped": (1, signal.SIGSTOP),
}
HOSTS = 8
NO_SIGNAL = 0


def child(folder: Path, group: int, victim: int, number: int) -> None:
    """A process of the job. Files in the folder have the times when it was hit, and told."""
    import jdaso
    from jdaso.cluster import links, topology

    told = threading.Event()

    def note(*_: object) -> None:
        if not told.is_set():
            told.set()
            write(folder / f"told_{job.rank}")

    links.GROUP, topology.abort = group, note  # instead of ending all processes
    job = jdaso.discover_topology()
    job.comm.Barrier()
    if job.rank == victim:
        write(folder / "hit")
        os.kill(os.getpid(), number)
    while not told.is_set():
        if victim in job.heartbeat.silent_ranks():
            note()
        time.sleep(1e-3)
    time.sleep(LIMIT)


def write(path: Path) -> None:
    """Writes the time to a file, which appears at once as a whole."""
    path.with_suffix(".new").write_text(repr(time.time()))
    path.with_suffix(".new").rename(path)


def measure(start: Callable[[list[str]], Callable], options, rank, number, others, cut=None) -> str:
    """The number of processes that were told, and the seconds until the first and last knew.

    ``start`` starts a job and returns what ends it. ``cut`` is called when the job runs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, until = Path(name), time.time() + LIMIT
        own = ["--child", name, str(options.group), str(rank), str(int(number))]
        end = start([sys.executable, __file__, *own])
        try:
            while not (folder / "hit").exists() and time.time() < until:
                time.sleep(1e-2)
            if not (folder / "hit").exists():
                return "the job did not start | - | -"
            if cut is not None:
                cut()
                write(folder / "hit")
            told: list[Path] = []
            while len(told) < others and time.time() < until:
                time.sleep(1e-2)
                told = list(folder.glob("told_*[0-9]"))
        finally:
            end()
        hit = float((folder / "hit").read_text())
        seconds = [float(path.read_text()) - hit for path in told]
    if not seconds:
        return "0 | - | -"
    return f"{len(seconds)} | {min(seconds):.2f} | {max(seconds):.2f}"


def on_this_host(processes: int) -> Callable[[list[str]], Callable]:
    """Starts jobs whose launcher does not notice deaths."""
    from faulty_job import UNNOTICED

    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    mpiexec = shutil.which("mpiexec", path=path) or sys.exit("mpiexec is not on PATH")

    def start(command: list[str]) -> Callable:
        job = subprocess.Popen(
            [mpiexec, "-n", str(processes), *UNNOTICED, *command],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PATH": path},
        )

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()

        return end

    return start


def measure_cut_link(options: argparse.Namespace) -> str:
    """The row of a cut link. The processes of its host are cut off, and do not count."""
    sys.path.insert(0, str(Path(__file__).parent / "lab"))
    import lab

    if lacking := lab.missing():
        return f"{lacking} | - | -"
    each = max(1, options.processes // HOSTS)
    with lab.up(HOSTS) as cluster:

        def start(command: list[str]) -> Callable:
            arguments = {"processes_per_node": each, "env": {"JAX_PLATFORMS": "cpu"}}
            job = threading.Thread(target=cluster.run, args=[command], kwargs=arguments)
            job.start()

            def end() -> None:
                cluster.down()
                job.join()

            return end

        last = HOSTS - 1
        victim = others = last * each
        return measure(start, options, victim, NO_SIGNAL, others, lambda: cluster.cut(last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--group", type=int, default=2)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, *numbers = options.child
        return child(Path(folder), *map(int, numbers))
    from machine import machine

    print(machine())
    print("| fault | others told | first, s | last, s |\n|---|---|---|---|", flush=True)
    for name, (victim, number) in CASES.items():
        start, rank = on_this_host(options.processes), min(victim, options.processes - 1)
        row = measure(start, options, rank, number, options.processes - 1)
        print(f"| {name} | {row} |", flush=True)
    print(f"| the link of a host is cut | {measure_cut_link(options)} |", flush=True)


if __name__ == "__main__":
    main()
