"""The exchanges of a process: those that are reserved, and those that are posted."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from jdaso.core.exchange import UNCOUNTED
from jdaso.core.types import JdasoError
from jdaso.exchange.host.buffers import BufferPool, StagingBuffers
from jdaso.exchange.host.layout import Layout

# The longest wait for another device of this node, or for copies.
_SECONDS = 30.0
T = TypeVar("T")


class _Reserved:
    """Buffers that ``senders`` devices reserve and fill."""

    def __init__(self, staging: StagingBuffers, senders: int):
        self.staging = staging
        self.missing = senders - 1  # devices that have not reserved the buffers
        self.filling = senders  # devices that have not filled them


class ReservedExchanges:
    """Buffers of reserved exchanges, by number.

    A program may end before its copies do, so an exchange may still be reserved then. ``changed``
    is notified when an exchange is posted or discarded.
    """

    def __init__(self, changed: threading.Condition):
        self._changed = changed
        self._reserved: dict[int, _Reserved] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._reserved

    def add(self, number: int, staging: StagingBuffers, layout: Layout) -> StagingBuffers:
        """Keeps buffers, which it returns, until their exchange is posted."""
        staging.layout = layout
        with self._changed:
            self._reserved[number] = _Reserved(staging, layout.senders)
        return staging

    def join(self, number: int) -> StagingBuffers | None:
        """The buffers that another sender has reserved; None if this device is the first."""
        with self._changed:
            reserved = self._reserved.get(number)
            if reserved is None or reserved.missing == 0:
                return None
            reserved.missing -= 1
            return reserved.staging

    def filled(self, number: int) -> StagingBuffers | None:
        """Counts a device that has filled its part; the last one removes the buffers.

        The caller holds the lock until it has posted the buffers.
        """
        with self._changed:
            reserved = self._reserved[number]
            reserved.filling -= 1
            if reserved.filling:
                return None
            self._changed.notify_all()
            return self._reserved.pop(number).staging

    def discard(self, number: int) -> None:
        """Removes an exchange that cannot be posted because copying its leaves failed."""
        with self._changed:
            self._reserved.pop(number, None)
            self._changed.notify_all()

    def wait_until_posted(self, but: int | None = None) -> None:
        """Waits until no exchange is pending, except for the exchange ``but``.

        Raises:
            JdasoError: If an exchange stays pending for 30 seconds.
        """
        with self._changed:

            def others() -> set[int]:
                return self._reserved.keys() - {but}

            if not self._changed.wait_for(lambda: not others(), _SECONDS):
                raise JdasoError(
                    f"exchange {min(others())} was reserved but not posted within {_SECONDS:g} s: "
                    "copying the parameters to the host has failed or hangs. Look for an earlier "
                    "error of this process."
                )


class ExchangeTable(Generic[T]):
    """Exchanges by number. Callers hold ``lock`` around calls that belong together.

    Attributes:
        lock: Reentrant; notified when an exchange is posted or discarded.
        pending: The exchanges that are reserved and not yet posted.
        posted: The exchanges that are posted and not yet collected.
        pool: The buffers of completed exchanges.
    """

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.pending = ReservedExchanges(self.lock)
        self.posted: dict[int, T] = {}
        self.pool = BufferPool()
        self._collections: dict[int, int] = {}
        self._highest, self._restarted = UNCOUNTED, False

    def restart(self) -> None:
        """Allows the numbers of exchanges to start again, once."""
        self._restarted = True

    def reserve(self, number: int, layout: Layout, posted_twice: str) -> StagingBuffers:
        """Buffers for an exchange, the same for all its senders.

        Raises:
            JdasoError: With the text ``posted_twice``, for a number that is not new.
        """
        with self.lock:
            if (staging := self.pending.join(number)) is not None:
                return staging
            known = number in self.posted or number in self.pending
            if (known or UNCOUNTED < number <= self._highest) and not self._restarted:
                raise JdasoError(posted_twice)
            if number == UNCOUNTED:
                return self.pending.add(number, StagingBuffers(layout.specs), layout)
            # Posted exchanges with these numbers belong to a state that the program has discarded.
            # One with a lower number may still be collected by another device of this node.
            for old in [n for n in self.posted if n >= number]:
                del self.posted[old]
                self._collections.pop(old, None)
            self._highest, self._restarted = number, False
            return self.pending.add(number, self.pool.acquire(layout.specs), layout)

    def post(self, number: int, exchange: T) -> None:
        """Adds an exchange that has been posted."""
        self.posted[number] = exchange
        self.lock.notify_all()

    def find(self, number: int, readers: int) -> T | None:
        """The posted exchange, or None if there is none.

        It waits up to 30 seconds for an exchange that is reserved, whose leaves are being copied.
        If several devices collect the exchange, it also waits for one that is unknown: the device
        that posts it may come after the others.
        """

        def known() -> bool:
            return number in self.posted or (readers == 1 and number not in self.pending)

        with self.lock:
            self.lock.wait_for(known, _SECONDS)
            return self.posted.get(number)

    def collect(self, number: int, readers: int) -> tuple[bool, bool]:
        """Counts a device that has collected; returns whether it was the first and the last."""
        collected = self._collections.pop(number, 0) + 1
        if collected < readers:
            self._collections[number] = collected
        else:
            self.posted.pop(number, None)
        return collected == 1, collected >= readers

    def clear(self) -> None:
        """Forgets all posted exchanges. Numbers may start again."""
        with self.lock:
            self.posted.clear()
            self._collections.clear()
            self._highest = UNCOUNTED
