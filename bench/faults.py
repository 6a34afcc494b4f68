"""What becomes of a training when something goes wrong: every fault, in every phase.

    python bench/faults.py [--faults STUCK NAN ...] [--phases "DaSGD" ...]

Two processes train for some seconds, and to the second one a fault happens (jdaso.testing). What
ends is started again. A fault is detected when a process says what is wrong; steps are lost when
they are taken a second time; a process that is still there five seconds after the launcher has
ended is an orphan. Faults of links need root, and what else bench/lab does. The exit status is 1
if one of the outcomes was not the promised one.
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

# A phase: which algorithm, and at which step something goes wrong; some steps before the end, since
# a signal is heeded by all four steps later.
PHASES = {
    "DASO, warm-up": ("daso", 8),
    "DASO, cycling": ("daso", 17),
    "DASO, cool-down": ("daso", 23),
    "DaSGD": ("dasgd", 17),
    "EASGD": ("easgd", 18),
}
CENTER, CENTER_STEP = "the centre", 17
GOES_ON, ENDS, LOST, SAVES = "goes on", "ends", "ends, status 69", "saves, status 75"
# mpiexec waits for a host that is gone until it is killed, with the process that asked it to end.
KILLED, STATUS_KILLED = "ends, killed", 9


class Case(NamedTuple):
    """A fault, what is promised, and what says that it was noticed.

    ``unnoticed``: the launcher must not see the death of a process, as srun without -K does not;
    mpiexec would end all others before they could say a word. ``within``: seconds to detect it.
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
    "WRONG_SHAPE": Case("WRONG_SHAPE", ENDS, "out of step"),
    "KILL_IN_CHECKPOINT": Case("KILL_IN_CHECKPOINT", LOST, DEAD, unnoticed=True),
    "DISK_FULL": Case("DISK_FULL", ENDS, "could not be written by rank 1"),
    "SIGTERM": Case("SIGTERM", SAVES, "rank 0 ended"),
}


# What is said where it happens to a worker around a centre, and whether that comes to its end, too.
CENTER_CASES = {
    "FAIL_BEFORE_POST": ("rank 1 .* has died; the others go on", False),
    "FAIL_IN_FLIGHT": ("rank 1 .* has died; the others go on", False),
    "FAIL_IN_FINISH": ("rank 1 .* has died; the others go on", False),
    "STUCK": ("stopped .SIGSTOP", True),  # and continued when the other has ended
    "SLOW_POST": ("sleeps for some seconds", True),
    "NAN": ("rank 1 ended, finite: True, left out: 1", True),
    "WRONG_SHAPE": ("rank 1 .* failed; the others go on", False),
    "SIGTERM": ("rank 1 .* has died; the others go on", False),
}


class Row(NamedTuple):
    """A measured cell of the table."""

    fault: str
    phase: str
    outcome: str
    detected: str
    lost: str
    kept: bool


def measure(fault: str, phase: str) -> Row:
    """One training with a fault, and another one if it has to be resumed."""
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
        happened = job.first("jdaso.testing: rank 1")
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
                # EASGD posts what it had before the step.
                outcome += " and a sum without its node" if job.first("left out: 1") else ""
        else:
            again = run(common, PROCESSES, LONGEST_SECONDS, in_lab=case.in_lab)
            resumed = min(again.numbers(r"resumed from step (\d+)"), default=0)
            done = max(job.numbers(r"has done (\d+) steps"), default=0)
            sound = again.status == 0 and not again.orphans
            if not sound:
                job.lines.extend([(0.0, f"and again, status {again.status}:"), *again.lines])
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
    """Two workers around a centre, and what the first does when it happens to the second."""
    notice, survives = CENTER_CASES[fault]
    text = f"{fault}:1:{CENTER_STEP}:{CASES[fault].seconds}"
    job = run(["--fault", text], PROCESSES, LONGEST_SECONDS, around_center=True)
    happened, noticed = job.first("jdaso.testing: rank 1"), job.first(notice)
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
        print(f"{lack}; without it: --faults {others}")
        return lab.SKIPPED
    # A job that is under way ends, too, when this program is asked to.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(machine(), flush=True)
    print("| fault | phase | outcome | seconds to detect | steps lost | as promised |")
    print("|---|---|---|---|---|---|", flush=True)
    rows = []
    for fault in options.faults:
        for phase in options.phases:
            if phase == CENTER and fault not in CENTER_CASES:
                continue  # it has no checkpoints, and its links are those of all
            row = measure_center(fault) if phase == CENTER else measure(fault, phase)
            rows.append(row)
            print(f"| {' | '.join(row[:-1])} | {'yes' if row.kept else 'NO'} |", flush=True)
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
