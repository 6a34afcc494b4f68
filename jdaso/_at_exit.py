"""What a process does at its end, and a child that it has forked does not."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any


def at_exit(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function when this process exits; its forks would say farewell in its name."""
    own = os.getpid()
    atexit.register(lambda: function(*arguments) if os.getpid() == own else None)
