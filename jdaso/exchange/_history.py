"""What exchanges have cost: sums since the start, and the last thousand one by one."""

from __future__ import annotations

from collections import deque

import numpy as np

from jdaso._base import Flown, nothing_to_report


class History:
    """Counts exchanges that have ended.

    >>> history = History()
    >>> record = np.zeros((), [("fill", "<f8", (2,)), ("take", "<f8", (2,))])
    >>> nowhere = (0.0, 0.0)
    >>> history.note(Flown(1, 3, 80, nowhere, (5.0, 7.0), (6.5, 7.0), nowhere), record)
    >>> history.report()
    {'exchanges': 1, 'bytes_sent': 80, 'seconds_blocked': 0.5, 'seconds_in_flight': 2.0}
    """

    def __init__(self) -> None:
        self._report = nothing_to_report()
        self._flown: deque[tuple[Flown, np.ndarray]] = deque(maxlen=1000)

    def note(self, flown: Flown, record: np.ndarray) -> None:
        """Counts one; when it was copied its memory's record says, once that has happened."""
        self._report["exchanges"] += 1
        self._report["bytes_sent"] += flown.bytes_sent
        self._report["seconds_blocked"] += flown.wait[1] - flown.wait[0]
        self._report["seconds_in_flight"] += flown.flight[1] - flown.flight[0]
        self._flown.append((flown, record))

    def report(self) -> dict[str, float]:
        """Exchanges collected, bytes sent for them, seconds in flight, seconds waited for."""
        return dict(self._report)

    def last(self) -> list[Flown]:
        """The last exchanges, and what took how long."""
        return [
            flown._replace(fill=tuple(record["fill"].tolist()), take=tuple(record["take"].tolist()))
            for flown, record in self._flown
        ]
