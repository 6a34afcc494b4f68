"""The interface between workers and the center, and the state that the server keeps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdaso.core.exchange import FINITE, HEADER_SIZE, Exchange
from jdaso.core.types import Leaves, PyTree
from jdaso.core.validation import is_concrete

#: What is wrong with a collective call of the workers of a center, and what to do.
ONLY_WITH_THE_SERVER = (
    "workers of a center do not communicate with each other: broadcast and consensus are not "
    "available. Use center.join and center.read."
)


class CenterState(NamedTuple):
    """The state of the server. Fields are lists of leaves on the server, trees for workers.

    Attributes:
        center: The center c, float32 (float64 for float64 leaves).
        velocity: v of :func:`mdownpour`, in the shapes of c; otherwise ().
        average: z of :func:`adownpour` and :func:`mvadownpour`; otherwise ().
        clock: int32, the number of updates of c, the master's clock of the paper.
    """

    center: PyTree
    velocity: PyTree
    average: PyTree
    clock: jax.Array | np.integer


def first_state(leaves: Leaves) -> CenterState:
    """The state of a server that has only a center, before its first update."""
    return CenterState([1 * x for x in leaves], (), (), np.int32(0))


def map_state(function: Callable[[Any], Any], state: CenterState) -> CenterState:
    """Applies a function to the center, and to velocity and average unless they are ()."""

    def mapped(tree: Any) -> Any:
        return () if isinstance(tree, tuple) and tree == () else function(tree)

    center, velocity, average, clock = state
    return CenterState(mapped(center), mapped(velocity), mapped(average), clock)


class ServerRule(NamedTuple):
    """How the server updates its state with a message, on NumPy or JAX arrays.

    Attributes:
        name: Name with all hyperparameters. Workers with another name are refused.
        init: ``(leaves) -> state``, from the leaves of the first center.
        update: ``(state, message) -> (state, reply)``. Message and reply are lists of leaves in the
            shapes and dtypes of the center. The server handles messages one at a time.
    """

    name: str
    init: Callable[[list[Any]], CenterState]
    update: Callable[[CenterState, list[Any]], tuple[CenterState, list[Any]]]


class Center:
    """The connection of workers to the center, the asynchronous counterpart of an Exchange.

    Attributes:
        num_workers: p in the papers.
        in_turns: Whether no other worker intervenes between two exchanges of one step.
    """

    in_turns = False

    def __init__(self, num_workers: int):
        self.num_workers = num_workers

    def make_exchange(self, rule: ServerRule) -> Exchange:
        """Makes an exchange whose sum is the server's reply to this worker."""
        raise NotImplementedError

    def join(self, params: PyTree, saved: CenterState | None = None) -> PyTree:
        """Returns the current center.

        Node 0 creates it from its parameters or, to resume a training, from ``saved``, a result of
        :meth:`read`. The other nodes wait for node 0, and their values are ignored. A worker that
        joins again starts anew, with ``tx.init``.
        """
        raise NotImplementedError

    def read(self, params: PyTree) -> CenterState:
        """Returns the state of the server as trees of NumPy arrays like ``params``."""
        raise NotImplementedError

    def write(self, state: CenterState) -> None:
        """Replaces the state of the server while workers train."""
        raise NotImplementedError

    def wait(self) -> None:
        """Waits, on node 0, until every other worker has ended, failed or is gone."""

    def report(self) -> dict[str, Any]:
        """Returns, on node 0, how many exchanges each of the ``workers`` has made.

        It also lists those that ``ended``, those that ``failed`` by an exception, and those that
        are ``gone``, because they died or have been silent for too long.
        """
        return dict(workers={}, ended=[], failed=[], gone=[])


def check_center(name: str, center: Center) -> None:
    if not isinstance(center, Center):
        raise ValueError(
            f"{name} needs a center, got {type(center).__name__}: make one with "
            "jdaso.center.mpi_center or jdaso.center.simulated_center."
        )


class CenterExchange(Exchange):
    """An exchange of messages with the server."""

    def broadcast(self, names: Sequence[str], leaves: Leaves, root: int) -> Leaves:
        raise ValueError(ONLY_WITH_THE_SERVER)


def reply_header(finite: Any) -> list[Any]:
    """The header of a reply, to which only the server contributes."""
    header = [0.0] * HEADER_SIZE
    header[0], header[FINITE] = 1.0, finite
    return header


def python_float(argument: str, value: Any) -> Any:
    """Converts a concrete number to float, because NumPy's float64 would widen float32 arrays."""
    return float(value) if is_concrete(argument, value) else value
