"""How long operations take, and from when on one is late: soon a warning, in the end an error."""

from __future__ import annotations

import math
import statistics
from collections import deque

# Median and median deviation of the last ones; a normal distribution's sigma is 1.5 deviations.
_REMEMBERED = 100
_ENOUGH = 5
_WARNING_DEVIATIONS, _DEADLINE_DEVIATIONS = 20.0, 200.0
_WARNING_SECONDS = 30.0


class Pace:
    """The seconds that operations took, and what follows for the next.

    With m the median of the last hundred and D the median of their distances from it, one is late
    after ``max(30 s, m + 20 D)`` (half of ``timeout``, where that is less than 30 s) and lost after
    ``max(timeout, m + 200 D)``: a link that is always slow is no reason to warn, and none to stop.

    Args:
        timeout: seconds, which a deadline is never below; infinite where nothing is ever late.

    >>> pace = Pace(timeout=60.0)
    >>> for seconds in (50.0, 52.0, 48.0, 50.0, 51.0):
    ...     pace.note(seconds)
    >>> pace.warning(), pace.deadline()
    (70.0, 250.0)
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._middle = self._deviation = 0.0

    def note(self, seconds: float) -> None:
        """Remembers how long an operation took."""
        self._seconds.append(seconds)
        if len(self._seconds) >= _ENOUGH:
            self._middle = statistics.median(self._seconds)
            self._deviation = statistics.median(abs(s - self._middle) for s in self._seconds)

    def warning(self) -> float:
        """Seconds after which an operation is late."""
        if math.isinf(self._timeout):
            return math.inf
        least = min(_WARNING_SECONDS, self._timeout / 2)
        return max(least, self._middle + _WARNING_DEVIATIONS * self._deviation)

    def deadline(self) -> float:
        """Seconds after which an operation is taken for lost."""
        return max(self._timeout, self._middle + _DEADLINE_DEVIATIONS * self._deviation)
