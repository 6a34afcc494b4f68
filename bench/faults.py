"""Injects every fault in every phase of a training, and checks how the training ends.

    python bench/faults.py [--faults STUCK NAN ...] [--phases "DaSGD" ...]
    python bench/faults.py told [--processes 16]
    python bench/faults.py soak [--minutes 30] [--nodes 3] [--seed 0]

Two processes train for some seconds, and a fault is injected into the second one (jdaso.faults).
A training that ends is started again. A fault is detected when a process prints what is wrong.
Steps are lost if they are taken a second time. A process that runs five seconds after the launcher
has ended is an orphan. Faults of links need root and the other requirements of bench/lab. The exit
status is 1 if an outcome is not the promised one.

- told: who learns of the death or the silence of a process, and after how long. One process is
  killed or stopped. The table has the number of the others that were told, and the seconds until
  the first and the last of them said so. In the last row, the processes run on eight hosts of the
  network lab, and the link of the last host is cut. Without the lab the row says what is missing.
- soak: the same training runs twice on nodes of bench/lab. The undisturbed training runs at full
  speed. The disturbed training has a pause in every step and a random fault about every minute, and
  is started again whenever it ends. The table compares both. The exit status is 1 if accuracies
  differ by more than a point, if a job had to be killed or printed nothing for a minute, if a
  process outlived its job, or if the memory of a process grew by more than 5 %.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import faulty_training
import numpy as np
from machine import header, machine, row
from mpi_job import Ended, watch

import jdaso
from jdaso.cluster import topology
from jdaso.faults import Fault, Kind

sys.path.insert(0, str(Path(__file__).parent / "lab"))
import lab

TRAINING = str(Path(faulty_training.__file__))
PROCESSES, LONGEST_SECONDS = 2, 90.0

# The algorithm of each phase, and the step of the fault. It is some steps before the end, because
# all processes react to a signal up to four steps later.
PHASES = {
    "DASO, warm-up": ("daso", 8),
    "DASO, cycling": ("daso", 17),
    "DASO, cool-down": ("daso", 23),
    "DaSGD": ("dasgd", 17),
    "EASGD": ("easgd", 18),
}
CENTER, CENTER_STEP = "the center", 17
GOES_ON, ENDS, LOST, SAVES = "goes on", "ends", "ends, status 69", "saves, status 75"
# mpiexec waits for a lost host. The aborting process kills it after some seconds.
KILLED, STATUS_KILLED = "ends, killed", 9


class Case(NamedTuple):
    """A fault, the promised outcome, and how the fault is detected.

    Attributes:
        kind: Name of the fault, a member of ``jdaso.faults.Kind``.
        promise: The promised outcome.
        notice: Pattern of the line that shows the detection.
        seconds: Duration of the fault.
        unnoticed: Whether the launcher must not see the death of a process, like srun without -K.
            mpiexec would end all other processes before they can print what is wrong.
        in_lab: Whether the fault needs the network lab.
        within: Longest time until the detection, in seconds.
    """

    kind: str
    promise: str
    notice: str
    seconds: float = 0.0
    unnoticed: bool = False
    in_lab: bool = False
    within: float = 5.0


DEAD = "rank 1 .* has died"
GIVEN_UP = faulty_training.TIMEOUT + 5.0
CASES = {
    "FAIL_BEFORE_POST": Case("FAIL_BEFORE_POST", LOST, DEAD, unnoticed=True),
    "FAIL_IN_FLIGHT": Case("FAIL_IN_FLIGHT", LOST, DEAD, unnoticed=True),
    "FAIL_IN_FINISH": Case("FAIL_IN_FINISH", LOST, DEAD, unnoticed=True),
    "STUCK": Case("STUCK", LOST, "nothing came from rank 1 .* .silent", within=GIVEN_UP),
    "SLOW_POST": Case("SLOW_POST", GOES_ON, "is late.* rank 1 .* .alive", seconds=9.0),
    "SLOW_LINK": Case("SLOW_LINK", GOES_ON, "is late", seconds=4.0, in_lab=True),
    "LINK_DOWN, 3 s": Case("LINK_DOWN", GOES_ON, "is late", seconds=3.0, in_lab=True),
    "LINK_DOWN, for good": Case(
        "LINK_DOWN", KILLED, "nothing came from rank .* .silent", 1e6, in_lab=True, within=GIVEN_UP
    ),
    "NAN": Case("NAN", GOES_ON, "skipped: 1"),
    "WRONG_SHAPE": Case("WRONG_SHAPE", ENDS, "out of step|the program (copies|posts)"),
    "KILL_IN_CHECKPOINT": Case("KILL_IN_CHECKPOINT", LOST, DEAD, unnoticed=True),
    "DISK_FULL": Case("DISK_FULL", ENDS, "could not be written by rank 1"),
    "SIGTERM": Case("SIGTERM", SAVES, "rank 0 ended"),
}


# For a fault in a worker around a center: the pattern of the line that shows the detection, and
# whether the worker itself reaches the end of the training.
CENTER_CASES = {
    "FAIL_BEFORE_POST": ("rank 1 .* has died; the others continue", False),
    "FAIL_IN_FLIGHT": ("rank 1 .* has died; the others continue", False),
    "FAIL_IN_FINISH": ("rank 1 .* has died; the others continue", False),
    "STUCK": ("stopped .SIGSTOP", True),  # continued when the other worker has ended
    "SLOW_POST": ("sleeps for some seconds", True),
    "NAN": ("rank 1 ended, finite: True, left out: 1", True),
    "WRONG_SHAPE": ("rank 1 .* failed; the others continue", False),
    "SIGTERM": ("rank 1 .* has died; the others continue", False),
}


class Row(NamedTuple):
    """A measured row of the table."""

    fault: str
    phase: str
    outcome: str
    detected: str
    lost: str
    kept: bool


def measure(fault: str, phase: str) -> Row:
    """Runs a training with a fault, and resumes it if it ends early."""
    case, (algorithm, step) = CASES[fault], PHASES[phase]
    with tempfile.TemporaryDirectory(prefix="jdaso-faults-") as folder:
        common = [TRAINING, "--folder", folder, "--algorithm", algorithm]
        fault_text = f"{case.kind}:1:{step}:{case.seconds}"
        job = watch(
            [*common, "--fault", fault_text],
            PROCESSES,
            LONGEST_SECONDS,
            unnoticed=case.unnoticed,
            in_lab=case.in_lab,
        )
        happened = job.first("fault: rank 1, step")
        noticed = job.first(case.notice)
        detected = "-"
        if happened is not None and noticed is not None and case.kind != "NAN":
            detected = f"{max(0.0, noticed - happened):.2f}"
        if case.promise == GOES_ON:
            sound = job.status == 0 and len(job.numbers(r"rank (\d) ended, finite: True")) == 2
            outcome, lost = "goes on" if sound else f"status {job.status}", "0"
            kept = sound and (happened is not None or case.kind == "NAN")
            if case.kind == "NAN":
                kept &= noticed is not None
                outcome += ", without that step" if noticed else ""
                # EASGD posts the parameters before the step.
                outcome += " and a sum without its node" if job.first("left out: 1") else ""
        else:
            again = watch(common, PROCESSES, LONGEST_SECONDS, in_lab=case.in_lab)
            resumed = min(again.numbers(r"resumed from step (\d+)"), default=0)
            done = max(job.numbers(r"has done (\d+) steps"), default=0)
            sound = again.status == 0 and not again.orphans
            if not sound:
                job.lines.extend([(0.0, f"resumed, status {again.status}:"), *again.lines])
            outcome = f"ends, status {job.status}"
            outcome += f"; resumed from step {resumed}" if sound else "; NOT RESUMED"
            lost = str(done - resumed)
            promised = {
                LOST: job.status == 69,
                KILLED: job.status in (69, STATUS_KILLED),
                SAVES: job.status == 75 and done == resumed,
            }
            kept = promised.get(case.promise, job.status not in (0, None))
            kept &= sound and happened is not None and noticed is not None
            kept &= detected != "-" and float(detected) <= case.within
        if job.orphans:
            kept, outcome = False, f"{outcome}; {job.orphans} ORPHANS"
        if not kept:
            print("\n".join(line for _, line in job.lines[-120:]), file=sys.stderr)
        return Row(fault, phase, outcome, detected, lost, kept)


def measure_center(fault: str) -> Row:
    """Runs two workers around a center with a fault in the second one."""
    notice, survives = CENTER_CASES[fault]
    text = f"{fault}:1:{CENTER_STEP}:{CASES[fault].seconds}"
    program = [TRAINING, "--algorithm", "center", "--fault", text]
    job = watch(program, PROCESSES, LONGEST_SECONDS, independent=True)
    happened, noticed = job.first("fault: rank 1, step"), job.first(notice)
    detected = "-"
    if happened is not None and noticed is not None and fault not in ("NAN", "SLOW_POST", "STUCK"):
        detected = f"{max(0.0, noticed - happened):.2f}"
    ended = set(job.numbers(r"rank (\d) ended, finite: True"))
    outcome = "the other goes on" if 0 in ended else "THE OTHER ENDS"
    outcome += ", it too" if 1 in ended else ""
    kept = ended == {0, *([1] if survives else [])} and noticed is not None and not job.orphans
    if not kept:
        print("\n".join(line for _, line in job.lines[-60:]), file=sys.stderr)
    return Row(fault, CENTER, outcome, detected, "-", kept)


def print_phases(options: argparse.Namespace) -> int:
    """Every fault in every phase."""
    if any(CASES[fault].in_lab for fault in options.faults) and (lack := lab.missing()):
        others = shlex.join(fault for fault in CASES if not CASES[fault].in_lab)
        print(f"{lack}; the faults that do not need it: --faults {others}")
        return lab.SKIPPED
    print(machine(), flush=True)
    names = ("fault", "phase", "outcome", "seconds to detect", "steps lost", "as promised")
    print(header(*names), flush=True)
    rows = []
    for fault in options.faults:
        for phase in options.phases:
            if phase == CENTER and fault not in CENTER_CASES:
                continue  # workers have no checkpoints, and the faults of links are covered above
            rows.append(measure_center(fault) if phase == CENTER else measure(fault, phase))
            print(row(*rows[-1][:-1], "yes" if rows[-1].kept else "NO"), flush=True)
    return 0 if all(one.kept for one in rows) else 1


# ------------------------------------------------------------------------- Who is told, and when

# Rank of the process, and the signal that it gets. All heartbeats meet in rank 0.
VICTIMS = {
    "a process is killed": (1, signal.SIGKILL),
    "rank 0 is killed": (0, signal.SIGKILL),
    "a process is stopped": (1, signal.SIGSTOP),
    "rank 0 is stopped": (0, signal.SIGSTOP),
}
HOSTS, LINK, TOLD_SECONDS = 8, 0, 200.0  # LINK is the number of no signal
TOLD = r"rank (\d+) is told"


def heartbeats(victim: int, number: int) -> None:
    """A process of the job. It prints when something happens to it, and when it is told."""
    told = threading.Event()

    def note(*_: object) -> None:
        if not told.is_set():
            told.set()
            print(f"rank {job.rank} is told", flush=True)

    topology.abort = note  # instead of ending all processes
    job = jdaso.discover_topology()
    job.comm.Barrier()
    if job.rank == victim:
        print(f"rank {victim} is hit", flush=True)
        if number == LINK:
            faulty_training.link(Fault(Kind.LINK_DOWN, victim, 0, TOLD_SECONDS))
        else:
            os.kill(os.getpid(), number)
    while not told.is_set():
        if victim in job.heartbeat.silent_ranks():
            note()
        time.sleep(1e-3)
    time.sleep(TOLD_SECONDS)


def measure_told(options: argparse.Namespace, victim: int, number: int) -> list[str]:
    """The number of processes that were told, and the seconds until the first and last said so."""
    cut = number == LINK
    per_node = max(1, options.processes // HOSTS) if cut else 1
    processes = HOSTS * per_node if cut else options.processes
    # The processes of a host that is cut off do not count.
    victim, others = (processes - per_node,) * 2 if cut else (victim, processes - 1)
    job = watch(
        [__file__, "--child", str(victim), str(int(number))],
        processes,
        TOLD_SECONDS,
        unnoticed=not cut,
        in_lab=cut,
        per_node=per_node,
        enough=lambda job: len(set(job.numbers(TOLD)) - {victim}) >= others,
    )
    hit = job.first(f"rank {victim} is hit")
    if hit is None:
        return ["the job did not start", "-", "-"]
    hit += faulty_training.LAST_WORDS if cut else 0.0
    told = [when - hit for when, line in job.lines for _ in re.findall(TOLD, line)]
    if not told:
        return ["0", "-", "-"]
    return [str(len(told)), f"{min(told):.2f}", f"{max(told):.2f}"]


def print_told(options: argparse.Namespace) -> int:
    """Who learns of a fault, and when."""
    print(machine())
    print(header("fault", "others told", "first, s", "last, s"), flush=True)
    for name, (victim, number) in VICTIMS.items():
        victim = min(victim, options.processes - 1)
        print(row(name, *measure_told(options, victim, number)), flush=True)
    lacking = lab.missing()
    cells = [lacking, "-", "-"] if lacking else measure_told(options, 0, LINK)
    print(row("the link of a host is cut", *cells), flush=True)
    return 0


# ------------------------------------------------------------------------------ Many random faults

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
        program = [TRAINING, "--folder", folder, "--steps", str(steps)]
        program += ["--save-every", str(int(SAVE_SECONDS / STEP_SECONDS))]
        program += ["--step-seconds", str(pause)]
        while (rest := start + seconds - time.monotonic()) > 0:
            texts = [f"--fault={f.kind.name}:{f.rank}:{f.step}:{f.seconds}" for f in left]
            job = watch([*program, *texts], nodes, rest, in_lab=True)
            jobs.append(job)
            taken = job.numbers(r"has done (\d+) steps")
            first = min(taken, default=done + 1) - 1
            repeated += done - first
            done = max([done, *taken])
            left = [fault for fault in left if not happened(fault, job, first)]
            print(f"  from step {first} to {done}: {why(job)}", flush=True)
            if job.status in (0, None):
                break
    right = [float(share) for share in matches(jobs[-1], r"has ([\d.]+) % right")]
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
        return first > fault.step or f"{fault.step + 1}" in matches(job, r"has done (\d+) steps")
    return any(
        int(rank) == fault.rank and int(step) >= fault.step and kind == fault.kind.value
        for rank, step, kind in matches(job, HAPPENED)
    )


def matches(job: Ended, pattern: str) -> list:
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
    held = [float(m) for m in matches(job, rf"rank {rank} holds ([\d.]+) MB")][SETTLING_SAVES:]
    return 100 * (held[-1] / held[0] - 1) if held else 0.0


def print_soak(options: argparse.Namespace) -> int:
    """A long training with random faults, beside the same without."""
    if lack := lab.missing():
        print(lack)
        return lab.SKIPPED
    # A third of the time is spent on restarts and on waiting for processes that do not respond.
    steps = int(options.minutes * 60 / STEP_SECONDS * 2 / 3)
    faults = draw(options.seed, options.nodes, steps)
    print(machine(), flush=True)
    rows = {}
    for name, these, pause in (("undisturbed", [], 0.0), ("disturbed", faults, STEP_SECONDS)):
        print(f"{name}: {steps} steps, {len(these)} faults", flush=True)
        rows[name] = train(options.nodes, steps, these, pause, 120 * options.minutes)
    print(f"\n{header('training', *Soak._fields)}")
    for name, found in rows.items():
        cells = (f"{cell:.2f}" if isinstance(cell, float) else cell for cell in found)
        print(row(name, *cells))
    points = abs(rows["disturbed"].right - rows["undisturbed"].right)
    sound = all(
        one.ended and one.silent < SILENT_SECONDS and one.growth < MOST_GROWTH and one.orphans == 0
        for one in rows.values()
    )
    print(
        f"accuracies differ by {points:.2f} points; "
        f"all other requirements are {'met' if sound else 'NOT met'}"
    )
    return 0 if sound and points <= MOST_POINTS else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("told", "soak"))
    parser.add_argument("--faults", nargs="+", choices=CASES, default=list(CASES), metavar="FAULT")
    phases = [*PHASES, CENTER]
    parser.add_argument("--phases", nargs="+", choices=phases, default=phases, metavar="PHASE")
    parser.add_argument("--processes", type=int, default=16, help="of told")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the disturbed soak")
    parser.add_argument("--nodes", type=int, default=3, help="nodes of the lab, of the soak")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults of the soak")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        heartbeats(*options.child)
        return 0
    # When this program is asked to end, the running job ends as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parts = {"told": print_told, "soak": print_soak, None: print_phases}
    return parts[options.part](options)


if __name__ == "__main__":
    sys.exit(main())
