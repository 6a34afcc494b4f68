"""Memory of exchanges that are about to be posted, while parameters are copied to it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TypeVar

from jdaso._base import JdasoError
from jdaso.exchange._staging import Staging

# How long to wait for another device of this node, or for its copies.
_SECONDS = 30.0
T = TypeVar("T")


class Reserved:
    """By the number of the exchange. A device's step may end before its copies do.

    Args:
        changed: of what is reserved and what flies; is notified when something was posted.
    """

    def __init__(self, changed: threading.Condition):
        self._changed = changed
        self._stagings: dict[int, Staging] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._stagings

    def put(self, number: int, staging: Staging) -> None:
        """Keeps memory until its exchange is posted."""
        with self._changed:
            self._stagings[number] = staging

    def take(self, number: int) -> Staging:
        """The memory of an exchange; whoever takes it holds ``changed`` until that flies."""
        with self._changed:
            self._changed.notify_all()
            return self._stagings.pop(number)

    def forget(self, number: int) -> None:
        """Gives up an exchange that cannot be posted, as copying has failed."""
        with self._changed:
            self._stagings.pop(number, None)
            self._changed.notify_all()

    def wait(self) -> None:
        """Waits until all are posted.

        Raises:
            JdasoError: if one is not, for long.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._stagings, _SECONDS):
                raise JdasoError(
                    f"exchange {min(self._stagings)} was begun and is not posted after "
                    f"{_SECONDS:g} s: copying the parameters to the host has failed, or hangs."
                )

    def flight(self, number: int, takers: int, flights: Mapping[int, T]) -> T | None:
        """What was posted under a number, once it was; None if it was not.

        Copies may be under way; and of several devices, which all collect, the one that posts may
        be the last.
        """

        def known() -> bool:
            return number in flights or (takers == 1 and number not in self)

        with self._changed:
            self._changed.wait_for(known, _SECONDS)
            return flights.get(number)
