"""The steps at which PASSM+ updates the whole model or a block, and their learning rates."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jdaso.core.validation import check_number, check_whole


class Phase(NamedTuple):
    """The kind of update of a step.

    Attributes:
        whole: Whether the step updates the whole model (ASSM) or the process's block (PASSM).
        factor: Factor of the learning rate.
    """

    whole: bool
    factor: float


def phases(switches: Sequence[int], processes: int) -> Callable[[int], Phase]:
    """The phases of PASSM+: ASSM and PASSM in turn, ASSM first (passm Sec. 4, Table 1).

    The learning rate is scaled by (1 - 1/c) at each switch from ASSM to PASSM (Sec. 4). The paper
    does not say whether a switch back to ASSM undoes that. Here it does not, so the factors of
    several switches multiply.

    Args:
        switches: Steps of a process, counted from 0, at which the other method begins. They are at
            least 1 and strictly increasing.
        processes: Number of processes that update concurrently; c in the paper.

    Returns:
        ``step -> Phase``.

    Raises:
        ValueError: For other switches, or for fewer than two processes, because the learning rate
            of one process would be scaled to 0.

    >>> phase = phases([10, 20, 30], processes=4)
    >>> [tuple(phase(step)) for step in (9, 10, 20, 30)]
    [(True, 1.0), (False, 0.75), (True, 0.75), (False, 0.5625)]
    """
    check_whole("processes", processes, 1)
    if processes == 1:
        raise ValueError(
            "passm_plus requires at least 2 processes, got 1: a switch scales the learning rate by "
            "1 - 1/processes. Use assm for one process."
        )
    for switch in switches:
        check_whole("switches", switch, 1)
    if list(switches) != sorted(set(switches)):
        raise ValueError(f"switches must be strictly increasing, got {list(switches)}.")
    steps, damping = list(switches), 1 - 1 / processes

    def phase(step: int) -> Phase:
        passed = bisect_right(steps, step)
        return Phase(passed % 2 == 0, damping ** ((passed + 1) // 2))

    return phase


def switches_around(
    drops: Sequence[int], total: int, first: float = 0.25, window: float = 0.1
) -> list[int]:
    """The heuristic of PASSM+: ASSM first and around drops of the learning rate (passm Sec. 4).

    Sec. 4 uses ASSM for "roughly 25 %" of the steps at first and for "roughly 10 %" around the
    drops, about half of all steps in total. That total, and Table 1, imply a tenth around each
    drop. Table 1 deviates from this rule: for ResNet-20 the last window ends at the drop itself,
    epoch 225 and not 240, so that ASSM has 40 % of the epochs, and for its three other trainings
    with PASSM+ the first phase is 15 %, which makes 45 %. Pass the switches of the table to
    :func:`passm_plus` to repeat it exactly.

    Args:
        drops: Steps at which the learning rate drops.
        total: Steps of the whole training.
        first: Share of the steps with ASSM at the beginning.
        window: Share of the steps with ASSM around each drop, half of it before the drop.

    Returns:
        The ``switches`` of :func:`passm_plus`. Adjacent windows are merged.

    Raises:
        ValueError: For drops outside of the training, or shares outside [0, 1].

    >>> switches_around([150, 225], total=300)  # Table 1 has 75, 135, 165, 210, 225
    [75, 135, 165, 210, 240]
    >>> switches_around([60, 120, 160], total=200, first=0.15)  # Table 1, Shufflenet and others
    [30, 50, 70, 110, 130, 150, 170]
    """
    check_whole("total", total, 1)
    for name, share in (("first", first), ("window", window)):
        check_number(name, share)
        if share > 1:
            raise ValueError(f"{name} must be a share in [0, 1], got {share!r}.")
    for drop in drops:
        check_whole("drops", drop, 0)
        if drop >= total:
            raise ValueError(f"drops must be below total, {total}, got {drop}.")
    half = round(window * total / 2)
    ends = [0, max(1, round(first * total))]  # begin and end of each interval of ASSM
    for drop in sorted(drops) if half else ():
        begin, end = drop - half, drop + half
        if begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            ends += [begin, end]
    return [step for step in ends[1:] if step < total]
