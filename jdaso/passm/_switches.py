"""When PASSM+ updates the whole model and when blocks, and with which learning rate."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdaso._checks import check_number, check_whole


class Phase(NamedTuple):
    """How a step updates.

    Attributes:
        whole: the whole model, as ASSM, or only the process's own block, as PASSM.
        factor: what the learning rate is multiplied by.
    """

    whole: bool
    factor: float


def phases(switches: Sequence[int], processes: int) -> Callable[[int], Phase]:
    """PASSM+'s steps of ASSM and of PASSM in turn, beginning with ASSM (passm Sec. 4, Table 1).

    The learning rate is scaled by (1 - 1/c) at each switch from ASSM to PASSM. The paper does not
    say whether the way back undoes that; here it does not, as no other dampening is undone.

    Args:
        switches: the steps of a process, counted from 0, that begin the other kind; rising.
        processes: c, which update concurrently.

    Returns:
        ``step -> Phase``.

    Raises:
        ValueError: for switches that do not rise from 1 on, or fewer than two processes, whose
            learning rate would be scaled to 0.

    >>> phase = phases([10, 20, 30], processes=4)
    >>> [tuple(phase(step)) for step in (9, 10, 20, 30)]
    [(True, 1.0), (False, 0.75), (True, 0.75), (False, 0.5625)]
    """
    check_whole("processes", processes, 1)
    if processes == 1:
        raise ValueError(
            "passm_plus needs at least 2 processes, got 1: at a switch the learning rate is scaled "
            "by 1 - 1/processes. One process alone is assm."
        )
    for switch in switches:
        check_whole("switches", switch, 1)
    if list(switches) != sorted(set(switches)):
        raise ValueError(f"switches must rise, got {list(switches)}.")
    steps, damping = list(switches), 1 - 1 / processes

    def phase(step: int) -> Phase:
        passed = bisect_right(steps, step)
        return Phase(passed % 2 == 0, damping ** ((passed + 1) // 2))

    return phase


def switches_around(
    drops: Sequence[int], total: int, first: float = 0.25, window: float = 0.1
) -> list[int]:
    """PASSM+'s heuristic: ASSM first, and around each drop of the learning rate (passm Sec. 4).

    A quarter of the steps first, then a tenth around the drops, about half of all in total: that
    sum, and Table 1, mean a tenth around each drop. Table 1 differs from it in places, and begins
    some trainings with 15 %; pass its own switches for an exact repetition.

    Args:
        drops: steps at which the learning rate drops.
        total: steps of the whole training.
        first: share of them with ASSM in the beginning.
        window: share of them with ASSM around each drop, half of it before.

    Returns:
        The ``switches`` of :func:`passm_plus`; windows that touch are one.

    Raises:
        ValueError: for drops that lie outside of the training, or shares outside [0, 1].

    >>> switches_around([150, 225], total=300)  # Table 1, ResNet-20: 75, 135, 165, 210, 225
    [75, 135, 165, 210, 240]
    """
    check_whole("total", total, 1)
    for name, share in (("first", first), ("window", window)):
        check_number(name, share)
        if share > 1:
            raise ValueError(f"{name} must be a share in [0, 1], got {share!r}.")
    for drop in drops:
        check_whole("drops", drop, 0)
        if drop >= total:
            raise ValueError(f"drops must lie before the end at step {total}, got {drop}.")
    half = round(window * total / 2)
    ends = [0, max(1, round(first * total))]  # of the intervals of ASSM, begin and end in turn
    for drop in sorted(drops) if half else ():
        begin, end = drop - half, drop + half
        if begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            ends += [begin, end]
    return [step for step in ends[1:] if step < total]
