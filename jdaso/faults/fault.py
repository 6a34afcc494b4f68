"""The kinds of faults, and the faults of one process that are due at a step."""

import enum
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from jdaso.core.log import logger
from jdaso.core.validation import check_number, check_whole


class Kind(enum.Enum):
    """What happens to a process."""

    FAIL_BEFORE_POST = "killed before it posts"
    FAIL_IN_FLIGHT = "killed after it has posted"
    FAIL_IN_FINISH = "killed before it collects the result of an exchange"
    STUCK = "stopped (SIGSTOP) before it posts"
    SLOW_POST = "sleeps for some seconds before it posts"
    SLOW_LINK = "has a slow link for some seconds, from before it posts"
    LINK_DOWN = "has no link for some seconds, from before it posts"
    NAN = "computes gradients that are not finite"
    WRONG_SHAPE = "posts a leaf with one number too many"
    KILL_IN_CHECKPOINT = "killed while it writes a checkpoint"
    DISK_FULL = "cannot write files above 10 kB, from a checkpoint on"
    SIGTERM = "receives SIGTERM before it posts"


LINK = {Kind.SLOW_LINK, Kind.LINK_DOWN}


class Fault(NamedTuple):
    """A fault that happens once, at the first opportunity from a step on.

    Attributes:
        kind: What happens. If the kind says "posts", the opportunity is an exchange posted after
            this step or a later one. For a checkpoint, it is one saved at this step or later.
        rank: Rank of the process.
        step: Optimizer step, counted from 0.
        seconds: Duration, if the kind says "some seconds".

    >>> Fault(Kind.SLOW_POST, rank=1, step=12, seconds=3.0).kind.value
    'sleeps for some seconds before it posts'
    """

    kind: Kind
    rank: int
    step: int
    seconds: float = 0.0


class PendingFaults:
    """The faults of one process that have not happened yet; ValueError for an invalid fault.

    >>> pending = PendingFaults([Fault(Kind.STUCK, rank=1, step=12)], rank=1)
    >>> [len(pending.take({Kind.STUCK}, step)) for step in (11, 13, 14)]
    [0, 1, 0]
    """

    def __init__(self, faults: Iterable[Fault], rank: int):
        faults = list(faults)
        for fault in faults:
            if not isinstance(fault.kind, Kind):
                raise ValueError(f"kind must be one of jdaso.faults.Kind, got {fault.kind!r}.")
            check_whole("rank", fault.rank, 0)
            check_whole("step", fault.step, 0)
            check_number("seconds", fault.seconds)
        self._rank = rank
        self._pending = [fault for fault in faults if fault.rank == rank]

    def kinds(self) -> set[Kind]:
        return {fault.kind for fault in self._pending}

    def take(self, kinds: Collection[Kind], step: int) -> list[Fault]:
        """Removes, logs and returns the faults of these kinds that are due at a step."""
        due = [fault for fault in self._pending if fault.kind in kinds and fault.step <= step]
        self._pending = [fault for fault in self._pending if fault not in due]
        for fault in due:
            logger.warning("fault: rank %d, step %d: %s", self._rank, step, fault.kind.value)
        return due


def die() -> None:
    """Kills this process with SIGKILL, as the kernel does when memory is exhausted."""
    os.kill(os.getpid(), signal.SIGKILL)


def apply_before_post(fault: Fault, link: Callable[[Fault], None] | None) -> None:
    """Applies a fault that concerns the process or its link, before an exchange is posted."""
    signals = {
        Kind.FAIL_BEFORE_POST: signal.SIGKILL,
        Kind.STUCK: signal.SIGSTOP,
        Kind.SIGTERM: signal.SIGTERM,
    }
    if fault.kind in signals:
        os.kill(os.getpid(), signals[fault.kind])
    elif fault.kind is Kind.SLOW_POST:
        time.sleep(fault.seconds)
    elif fault.kind in LINK and link is not None:
        link(fault)
