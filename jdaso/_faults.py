"""What can go wrong in a process, and when it does: descriptions, the same in every run."""

from __future__ import annotations

import enum
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from jdaso._checks import check_number, check_whole


class Kind(enum.Enum):
    """What can happen to a process."""

    FAIL_BEFORE_POST = "killed before it posts"
    FAIL_IN_FLIGHT = "killed when it has posted"
    FAIL_IN_FINISH = "killed before it collects what it has posted"
    STUCK = "stopped (SIGSTOP) before it posts"
    SLOW_POST = "sleeps for some seconds before it posts"
    SLOW_LINK = "has a slow link for some seconds, from before it posts"
    LINK_DOWN = "has no link for some seconds, from before it posts"
    NAN = "computes gradients that are not finite"
    WRONG_SHAPE = "posts one number too many"
    KILL_IN_CHECKPOINT = "killed while it writes a checkpoint"
    DISK_FULL = "has a full disk, for files above 10 kB, from a checkpoint on"
    SIGTERM = "gets SIGTERM before it posts"


LINK = {Kind.SLOW_LINK, Kind.LINK_DOWN}


class Fault(NamedTuple):
    """One thing that goes wrong, once, at the first occasion from a step on.

    Attributes:
        kind: what. Where the kind says "posts", the occasion is an exchange that is posted after
            this step or a later one; for a checkpoint, one that is saved from this step on.
        rank: in which process.
        step: optimizer step, counted from 0.
        seconds: for how long, where the kind says "some seconds".

    >>> Fault(Kind.SLOW_POST, rank=1, step=12, seconds=3.0).kind.value
    'sleeps for some seconds before it posts'
    """

    kind: Kind
    rank: int
    step: int
    seconds: float = 0.0


class Due:
    """The faults of one process that have not happened yet.

    Raises:
        ValueError: for a fault that cannot be.

    >>> due = Due([Fault(Kind.STUCK, rank=1, step=12)], rank=1)
    >>> [len(due.take({Kind.STUCK}, step)) for step in (11, 13, 14)]
    [0, 1, 0]
    """

    def __init__(self, faults: Iterable[Fault], rank: int):
        faults = list(faults)
        for fault in faults:
            if not isinstance(fault.kind, Kind):
                raise ValueError(f"kind must be one of jdaso.testing.Kind, got {fault.kind!r}.")
            check_whole("rank", fault.rank, 0)
            check_whole("step", fault.step, 0)
            check_number("seconds", fault.seconds)
        self._rank = rank
        self._left = [fault for fault in faults if fault.rank == rank]

    def kinds(self) -> set[Kind]:
        """What will still happen."""
        return {fault.kind for fault in self._left}

    def take(self, kinds: Collection[Kind], step: int) -> list[Fault]:
        """Those of some kinds that are due at a step; they will not be again."""
        taken = [fault for fault in self._left if fault.kind in kinds and fault.step <= step]
        self._left = [fault for fault in self._left if fault not in taken]
        for fault in taken:
            what = f"rank {self._rank}, step {step}: {fault.kind.value}"
            print(f"jdaso.testing: {what}", file=sys.stderr, flush=True)
        return taken


def die() -> None:
    """Ends this process as the kernel does when memory is out, without a word."""
    os.kill(os.getpid(), signal.SIGKILL)


def happen(fault: Fault, link: Callable[[Fault], None] | None) -> None:
    """Does to this process what is done to a process as such."""
    if fault.kind is Kind.FAIL_BEFORE_POST:
        die()
    elif fault.kind is Kind.STUCK:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.kind is Kind.SLOW_POST:
        time.sleep(fault.seconds)
    elif fault.kind is Kind.SIGTERM:
        os.kill(os.getpid(), signal.SIGTERM)
    elif fault.kind in LINK and link is not None:
        link(fault)
