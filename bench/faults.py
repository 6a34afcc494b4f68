"""Injects every fault in every phase of a training, and checks how the training ends.

    python bench/faults.py [--faults STUCK NAN ...] [--phases "DaSGD" ...]

Two processes train for some seconds, and a fault is injected into the second one (jdaso.faults).
A training that ends is started again. A fault is detected when a process prints what is wrong.
Steps are lost if they are taken a second time. A process that runs five seconds after the launcher
has ended is an orphan. Faults of links need root and the other requirements of bench/lab. The exit
status is 1 if an outcome is not the promised one.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from faulty_job import run
from faulty_training import TIMEOUT
from machine import machine

sys.path.insert(0, str(Path(__file__).parent / "lab"))
import lab

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
GIVEN_UP = TIMEOUT + 5.0
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
    "WRONG_SHAPE": Case("WRONG_SHAPE", ENDS, "out of step|the program copies"),
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
        common = ["--folder", folder, "--algorithm", algorithm]
        fault_text = f"{case.kind}:1:{step}:{case.seconds}"
        job = run(
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
            again = run(common, PROCESSES, LONGEST_SECONDS, in_lab=case.in_lab)
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
    job = run(["--fault", text], PROCESSES, LONGEST_SECONDS, around_center=True)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=CASES, default=list(CASES), metavar="FAULT")
    phases = [*PHASES, CENTER]
    parser.add_argument("--phases", nargs="+", choices=phases, default=phases, metavar="PHASE")
    options = parser.parse_args()
    if any(CASES[fault].in_lab for fault in options.faults) and (lack := lab.missing()):
        others = shlex.join(fault for fault in CASES if not CASES[fault].in_lab)
        print(f"{lack}; the faults that do not need it: --faults {others}")
        return lab.SKIPPED
    # When this program is asked to end, the running job ends as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(machine(), flush=True)
    print("| fault | phase | outcome | seconds to detect | steps lost | as promised |")
    print("|---|---|---|---|---|---|", flush=True)
    rows = []
    for fault in options.faults:
        for phase in options.phases:
            if phase == CENTER and fault not in CENTER_CASES:
                continue  # workers have no checkpoints, and the faults of links are covered above
            row = measure_center(fault) if phase == CENTER else measure(fault, phase)
            rows.append(row)
            print(f"| {' | '.join(row[:-1])} | {'yes' if row.kept else 'NO'} |", flush=True)
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
