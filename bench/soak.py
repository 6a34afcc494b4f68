"""Trains for half an hour with a random fault about every minute.

    python bench/soak.py [--minutes 30] [--nodes 3] [--seed 0]

The same training runs twice on nodes of bench/lab. The undisturbed training runs at full speed. The
disturbed training has a pause in every step and a random fault (jdaso.faults) about every minute,
and is started again whenever it ends. The table compares both. The exit status is 1 if accuracies
differ by more than a point, if a job had to be killed or printed nothing for a minute, if a process
outlived its job, or if the memory of a process grew by more than 5 %.
"""

from __future__ import annotations

import argparse
import itertools
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from faulty_job import Ended, run
from machine import machine

from jdaso.faults import Fault, Kind

sys.path.insert(0, str(Path(__file__).parent / "lab"))
import lab

STEP_SECONDS, SAVE_SECONDS, FAULT_SECONDS = 0.1, 5.0, 60.0
# Duration of faults in seconds. A link is down for less time than the timeout of an exchange.
SECONDS = {Kind.SLOW_POST: 9.0, Kind.SLOW_LINK: 4.0, Kind.LINK_DOWN: 3.0}
SILENT_SECONDS, MOST_GROWTH, MOST_POINTS = 60.0, 5.0, 1.0
# Number of saves of a process until its memory use is stable.
SETTLING_SAVES = 6
HAPPENED = r"fault: rank (\d+), step (\d+): (.*)"


class Soak(NamedTuple):
    """The results of a training.

    Attributes:
        minutes: Time from the first start to the end.
        faults: Number of faults that happened.
        starts: Number of jobs.
        repeated: Number of steps that were taken a second time.
        right: Percentage of the test images that are classified correctly.
        silent: Longest time without a line from any process, in seconds.
        growth: Largest growth of the resident memory of a process, in percent.
        orphans: Number of processes that outlived their job.
        ended: Whether the training reached its end.
    """

    minutes: float
    faults: int
    starts: int
    repeated: int
    right: float
    silent: float
    growth: float
    orphans: int
    ended: bool


def draw(seed: int, nodes: int, steps: int) -> list[Fault]:
    """Draws about one fault a minute, of any kind and in any process."""
    random = np.random.default_rng(seed)
    every = FAULT_SECONDS / STEP_SECONDS
    faults, step = [], 0
    while (step := step + int(every * random.uniform(0.5, 1.5))) < steps - every / 2:
        kind = list(Kind)[random.integers(len(Kind))]
        faults.append(Fault(kind, int(random.integers(nodes)), step, SECONDS.get(kind, 0.0)))
    return faults


def train(nodes: int, steps: int, faults: list[Fault], pause: float, seconds: float) -> Soak:
    """Trains and restarts jobs that have ended, until the training is done or the time is over."""
    left, jobs, start, repeated, done = list(faults), [], time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory(prefix="jdaso-soak-") as folder:
        arguments = ["--folder", folder, "--steps", str(steps)]
        arguments += ["--save-every", str(int(SAVE_SECONDS / STEP_SECONDS))]
        arguments += ["--step-seconds", str(pause)]
        while (rest := start + seconds - time.monotonic()) > 0:
            texts = [f"--fault={f.kind.name}:{f.rank}:{f.step}:{f.seconds}" for f in left]
            job = run([*arguments, *texts], nodes, rest, in_lab=True)
            jobs.append(job)
            taken = job.numbers(r"has done (\d+) steps")
            first = min(taken, default=done + 1) - 1
            repeated += done - first
            done = max([done, *taken])
            left = [fault for fault in left if not happened(fault, job, first)]
            print(f"  from step {first} to {done}: {why(job)}", flush=True)
            if job.status in (0, None):
                break
    right = [float(share) for share in found(jobs[-1], r"has ([\d.]+) % right")]
    return Soak(
        minutes=(time.monotonic() - start) / 60,
        faults=len(faults) - len(left),
        starts=len(jobs),
        repeated=repeated,
        right=min(right, default=float("nan")),
        silent=max(longest_silence(job) for job in jobs),
        growth=max(growth(job, rank) for job in jobs for rank in range(nodes)),
        orphans=sum(job.orphans for job in jobs),
        ended=jobs[-1].status == 0,
    )


def happened(fault: Fault, job: Ended, first: int) -> bool:
    """Whether a fault has happened. A fault of a gradient prints nothing."""
    if fault.kind is Kind.NAN:
        return first > fault.step or f"{fault.step + 1}" in found(job, r"has done (\d+) steps")
    matches = (match for _, line in job.lines if (match := re.search(HAPPENED, line)))
    return any(
        int(match[1]) == fault.rank and int(match[2]) >= fault.step and match[3] == fault.kind.value
        for match in matches
    )


def found(job: Ended, pattern: str) -> list[str]:
    """All matches of a pattern in the lines of a job."""
    return [text for _, line in job.lines for text in re.findall(pattern, line)]


def why(job: Ended) -> str:
    """The last fault that happened, and the exit status."""
    last = [line for _, line in job.lines if re.search(HAPPENED, line)]
    return f"{last[-1] if last else 'nothing happened'}; status {job.status}"


def longest_silence(job: Ended) -> float:
    times = [when for when, _ in job.lines]
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def growth(job: Ended, rank: int) -> float:
    """Growth of the memory in percent, from its first stable value to the last save."""
    held = [float(m) for m in found(job, rf"rank {rank} holds ([\d.]+) MB")][SETTLING_SAVES:]
    return 100 * (held[-1] / held[0] - 1) if held else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of the disturbed run")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the lab")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults")
    options = parser.parse_args()
    if lack := lab.missing():
        print(lack)
        return lab.SKIPPED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A third of the time is spent on restarts and on waiting for processes that do not respond.
    steps = int(options.minutes * 60 / STEP_SECONDS * 2 / 3)
    faults = draw(options.seed, options.nodes, steps)
    print(machine(), flush=True)
    rows = {}
    for name, these, pause in (("undisturbed", [], 0.0), ("disturbed", faults, STEP_SECONDS)):
        print(f"{name}: {steps} steps, {len(these)} faults", flush=True)
        rows[name] = train(options.nodes, steps, these, pause, 120 * options.minutes)
    print(f"\n| training | {' | '.join(Soak._fields)} |\n|{'---|' * (len(Soak._fields) + 1)}")
    for name, row in rows.items():
        cells = (f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row)
        print(f"| {name} | {' | '.join(cells)} |")
    points = abs(rows["disturbed"].right - rows["undisturbed"].right)
    sound = all(
        row.ended and row.silent < SILENT_SECONDS and row.growth < MOST_GROWTH and row.orphans == 0
        for row in rows.values()
    )
    print(
        f"accuracies differ by {points:.2f} points; "
        f"all other requirements are {'met' if sound else 'NOT met'}"
    )
    return 0 if sound and points <= MOST_POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
