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
        self._median = self._deviation = 0.0

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)
        if len(self._seconds) >= _ENOUGH:
            self._median = statistics.median(self._seconds)
            self._deviation = statistics.median(abs(s - self._median) for s in self._seconds)

    def warning(self) -> float:
        """Seconds after which an operation is late."""
        if math.isinf(self._timeout):
            return math.inf
        least = min(_WARNING_SECONDS, self._timeout / 2)
        return max(least, self._median + _WARNING_DEVIATIONS * self._deviation)

    def deadline(self) -> float:
        """Seconds after which an operation fails."""
        return max(self._timeout, self._median + _DEADLINE_DEVIATIONS * self._deviation)
