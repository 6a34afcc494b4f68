"""What a program needs of the host to let something fly and to collect it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from jdaso.exchange._reserved import Reserved
from jdaso.exchange._staging import Spec, Staging
from jdaso.topology import Topology


class Carrier(Protocol):
    """Takes what a program posts, and has what comes back.

    Attributes:
        reserved: what is about to be posted.
    """

    reserved: Reserved

    def reserve(self, number: int, specs: Sequence[Spec]) -> Staging:
        """Host memory for an exchange that is about to be posted; the leaves go into it."""

    def post(self, number: int, step: int, header: np.ndarray) -> None:
        """Lets what is in the reserved memory fly."""

    def collect(self, number: int, takers: int) -> tuple[Staging, np.ndarray]:
        """Waits for an exchange; the memory in which the sums are, and their header."""

    def ending_all_devices(self) -> AbstractContextManager[None]:
        """Where an error must not leave devices waiting for the one that called the host."""


@contextlib.contextmanager
def ending_all_devices(topology: Topology, end: Callable[[str], object]) -> Iterator[None]:
    """Calls ``end`` with what went wrong, on an error where a process has several devices.

    The others are in a collective by then, waiting for the one that called the host: the error
    would never come out of the program.
    """
    try:
        yield
    except Exception as error:
        if len(topology.devices) > 1:
            end(f"{topology.describe(topology.rank)} failed: {type(error).__name__}: {error}")
        raise
