"""Deadlines of operations, derived from the durations of earlier ones."""

import math
import statistics
from collections import deque

# Durations that are kept, and how many of them a median needs.
_KEPT, _ENOUGH = 100, 5
# The sigma of a normal distribution is about 1.5 median deviations.
_WARNING_DEVIATIONS, _DEADLINE_DEVIATIONS = 20.0, 200.0
_WARNING_SECONDS = 30.0


class Deadlines:
    """Computes when an operation is late and when it fails.

    Let m be the median of the last hundred durations, and D the median of their distances from m.
    An operation is late after ``max(30 s, m + 20 D)``, with ``timeout / 2`` in place of 30 s where
    that is less. It fails after ``max(timeout, m + 200 D)``. A link that is always slow causes
    neither warnings nor errors.

    Args:
        timeout: Least seconds until an operation fails. With infinity, none is ever late.

    >>> deadlines = Deadlines(timeout=60.0)
    >>> for seconds in (50.0, 52.0, 48.0, 50.0, 51.0):
    ...     deadlines.note(seconds)
    >>> deadlines.warning(), deadlines.deadline()
    (70.0, 250.0)
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._seconds: deque[float] = deque(maxlen=_KEPT)

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def warning(self) -> float:
        """Seconds after which an operation is late."""
        if math.isinf(self._timeout):
            return math.inf
        return self._limit(min(_WARNING_SECONDS, self._timeout / 2), _WARNING_DEVIATIONS)

    def deadline(self) -> float:
        """Seconds after which an operation fails."""
        return self._limit(self._timeout, _DEADLINE_DEVIATIONS)

    def _limit(self, least: float, deviations: float) -> float:
        # Neither median nor deviation is above the longest duration. So those of short exchanges,
        # whose CPU time counts most, need not be computed.
        seconds = self._seconds
        if len(seconds) < _ENOUGH or (1 + deviations) * max(seconds) <= least:
            return least
        median = statistics.median(seconds)
        deviation = statistics.median(abs(s - median) for s in seconds)
        return max(least, median + deviations * deviation)
