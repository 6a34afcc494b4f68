"""What a process has measured of its exchanges."""

from collections import deque

import numpy as np

from jdaso.core.exchange import ExchangeRecord, empty_report


class Statistics:
    """Sums over all exchanges, and the records of the last thousand.

    >>> statistics = Statistics()
    >>> times = np.zeros((), [("copy_to_host", "<f8", (2,)), ("copy_to_device", "<f8", (2,))])
    >>> never = (0.0, 0.0)
    >>> statistics.note(ExchangeRecord(1, 3, 80, never, (5.0, 7.0), (6.5, 7.0), never), times)
    >>> statistics.report()
    {'exchanges': 1, 'bytes_sent': 80, 'seconds_blocked': 0.5, 'seconds_in_flight': 2.0}
    """

    def __init__(self) -> None:
        self._report = empty_report()
        self._records: deque[tuple[ExchangeRecord, np.ndarray]] = deque(maxlen=1000)

    def note(self, record: ExchangeRecord, copy_times: np.ndarray) -> None:
        """Adds an exchange. Its copy times are read later, when its copies have ended."""
        self._report["exchanges"] += 1
        self._report["bytes_sent"] += record.bytes_sent
        self._report["seconds_blocked"] += record.wait[1] - record.wait[0]
        self._report["seconds_in_flight"] += record.transfer[1] - record.transfer[0]
        self._records.append((record, copy_times))

    def report(self) -> dict[str, float]:
        """Exchanges collected, bytes sent, seconds in flight, and seconds that training waited."""
        return dict(self._report)

    def last(self) -> list[ExchangeRecord]:
        return [
            record._replace(
                copy_to_host=tuple(times["copy_to_host"].tolist()),
                copy_to_device=tuple(times["copy_to_device"].tolist()),
            )
            for record, times in self._records
        ]
