"""Names the public function that the program called, for messages about operations inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_caller: ContextVar[str] = ContextVar("_caller", default="")


def named(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose name :func:`caller` returns while it runs."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        token = _caller.set(_caller.get() or f"jdaso.{function.__name__}")
        try:
            return function(*args, **kwargs)
        finally:
            _caller.reset(token)

    return call


def caller() -> str:
    """The name of the outermost function that :func:`named` has wrapped; "" outside of them."""
    return _caller.get()
