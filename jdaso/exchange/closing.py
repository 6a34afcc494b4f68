"""The function ``close`` of an exchange."""

import threading
from collections.abc import Callable


def once(*functions: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls all functions once. Other threads wait until it has ended."""
    lock, remaining = threading.RLock(), list(functions)  # a signal handler may call it again

    def run() -> None:
        with lock:
            calls = remaining.copy()
            remaining.clear()
            for function in calls:
                function()

    return run
