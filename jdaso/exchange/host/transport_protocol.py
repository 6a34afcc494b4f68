"""What a compiled program needs of the host to post and collect exchanges."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import jax
import numpy as np

from jdaso.cluster.topology import Topology
from jdaso.core.log import logger
from jdaso.core.types import Leaves, Number
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.exchange_table import ReservedExchanges
from jdaso.exchange.host.layout import Layout


class Transport(Protocol):
    """Posts and collects the exchanges of this process.

    Attributes:
        pending: Exchanges that are reserved and not yet posted.
    """

    pending: ReservedExchanges

    def reserve(self, number: int, layout: Layout) -> StagingBuffers:
        """The buffers to which one device copies its leaves; the same for all its senders."""

    def post(self, number: int, step: int, header: np.ndarray) -> None:
        """Posts the exchange once all senders have called it, and returns without waiting."""

    def collect(self, number: int, readers: int) -> tuple[StagingBuffers, np.ndarray]:
        """Waits for an exchange, which ``readers`` devices collect. Returns buffers and header."""

    def abort_on_error(self) -> AbstractContextManager[None]:
        """A context in which an error aborts this process if other devices would wait for it."""


class Message(NamedTuple):
    """What a device posts.

    Attributes:
        choice: index of the wire to use. It is 0 without error feedback.
        feedback: residuals and anchors of the first leaves, if the copies compute error feedback.
    """

    number: Number
    step: Number
    choice: Number
    header: jax.Array
    leaves: Leaves
    feedback: tuple[Leaves, Leaves] = ([], [])


class HostCalls(Protocol):
    """How a device's part of a program calls the transport: by compiled code or by callbacks."""

    def post(
        self,
        layouts: Sequence[Layout],
        device: Number,
        token: jax.Array,
        message: Message,
        sends: jax.Array | bool = True,
    ) -> tuple[jax.Array, Leaves]:
        """Copies the leaves, or zeros if ``header[0]`` is 0. Returns token and new residuals.

        Args:
            layouts: on each wire that may be used.
            sends: whether this device sends. If not, it computes the new residuals only.
        """

    def collect(
        self,
        readers: int,
        device: Number,
        shapes: Sequence[jax.ShapeDtypeStruct],
        token: jax.Array,
        number: Number,
        part: slice,
        last: bool,
        feedback: tuple[jax.Array, Leaves, Leaves] | None,
        keep: bool,
        /,
    ) -> tuple[Leaves, jax.Array, jax.Array]:
        """Waits for an exchange. Returns a part of the sums, the header and the token.

        Args:
            readers: devices that collect the exchange.
            feedback: ``block_bits`` of the exchange, residuals and anchors of the first leaves.
                Their means are then returned in place of the sums, and the new residuals after
                all leaves.
            keep: as in :class:`jdaso.core.exchange.FeedbackOperations`.
        """


@contextlib.contextmanager
def abort_on_error(topology: Topology, abort: Callable[[str], object]) -> Iterator[None]:
    """Prints an error at once, and calls ``abort`` with it in a program with several devices.

    The other devices wait in a collective for the one that called the host. The program would
    therefore never raise the error. A program of one device raises it when it fetches a result,
    perhaps many steps later, in the words of XLA.
    """
    try:
        yield
    except Exception as error:
        reason = f"{topology.describe(topology.rank)} failed: {type(error).__name__}: {error}"
        if topology.mesh.size > 1:
            abort(reason)
        _print_once(reason)
        raise


@functools.cache
def _print_once(reason: str) -> None:
    logger.error("%s", reason)
