"""What a step of a setting is worth, as measured by bench/progress.py on small trainings."""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

from jdaso.core.exchange import Exchange
from jdaso.core.validation import is_concrete


class Loss(NamedTuple):
    """The progress that is lost, in natural logarithms.

    Attributes:
        period: For each doubling of the period.
        delay: For each doubling of the delay, which counts from 1.
        discarded: For the share of a node's progress that merges discard.
    """

    period: float
    delay: float
    discarded: float


#: By the number of nodes. ``python bench/progress.py --results FILE --table`` computes them.
MEASURED = {2: Loss(0.023, 0.050, 0.517), 8: Loss(0.082, 0.125, 0.594)}
#: The largest number of nodes and the longest period that were measured.
MEASURED_NODES, MEASURED_PERIOD = max(MEASURED), 8
#: Least share of the progress of Local SGD with the same period that needs no warning.
ENOUGH = 0.8


def progress(period: int, delay: int, nodes: int, weight: float) -> float:
    """Returns the steps of synchronous training that a step is worth, on average.

    With k the period, s the delay, and w the weight of the mean in a merge that replaces parameters
    by it in part (0 for a merge that adds a correction), the logarithm is

        -(a log2(k) + b log2(1 + s) + c w s / k)

    The coefficients are those of ``MEASURED`` for the number of nodes, interpolated between powers
    of two. Beyond 8 nodes they are those of 8. One node exchanges nothing and loses nothing.

    >>> round(progress(1, 0, nodes=2, weight=0.0), 2)
    1.0
    """
    if nodes == 1:
        return 1.0
    few, many = MEASURED.values()
    share = min(max(math.log2(nodes) - 1, 0), 2) / 2
    lost = Loss(*(a + share * (b - a) for a, b in zip(few, many, strict=True)))
    return math.exp(
        -lost.period * math.log2(period)
        - lost.delay * math.log2(1 + delay)
        - lost.discarded * weight * delay / period
    )


def warn_if_slow(
    name: str,
    exchange: Exchange,
    period: int | None,
    delay: int | None,
    weight: float,
) -> None:
    """Warns if late means of this weight, 0 for a correction, cost a fifth of the progress."""
    nodes = exchange.num_nodes
    if nodes < 2 or not (period and delay and is_concrete("weight", weight) and weight):
        return
    blocking = progress(period, 0, nodes, 0.0)
    mean, delta = (progress(period, delay, nodes, w) / blocking for w in (weight, 0.0))
    beyond = nodes > MEASURED_NODES or period > MEASURED_PERIOD
    if mean < ENOUGH:
        warnings.warn(
            f"{name} with period {period} and delay {delay} keeps {mean:.0%} of the progress per "
            f"step that blocking Local SGD with this period makes on {nodes} nodes, on average "
            f"over small trainings{' of 2 and 8 nodes with periods up to 8' * beyond}, at the "
            f'learning rates of synchronous training. With merge="delta" it keeps {delta:.0%}.',
            stacklevel=3,
        )
