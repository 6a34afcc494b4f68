"""The three parts an algorithm is composed of, as data: schedule, exchange, merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Leaves = list[jax.Array]
Number = jax.Array | int

#: What must be equal on all nodes, by the names that an error gives it; see ``_agreement.py``.
AGREED = ("period", "delay", "phase", "the schedule's state", "the shared state")
# Numbers that travel with every exchange, unrounded: whether the node contributes, the sum and
# number of the losses it has seen in this epoch, and what must be equal, which is not summed.
HEADER_SIZE = 3 + len(AGREED)
# The number of an exchange that is finished at once and not counted.
UNCOUNTED = -1


class JdasoError(RuntimeError):
    """Something went wrong between nodes; the message names ranks and hosts."""


class Plan(NamedTuple):
    """What the schedule asks for at one step; scalars, equal on all nodes.

    Attributes:
        phase: int32, which of the schedule's phases this step belongs to.
        period: int32, optimizer steps between two exchanges.
        delay: int32, optimizer steps that an exchange posted now may fly.
        clock: int32, steps taken since the present count of periods began, with this one.
        flush: bool, leave nothing in flight after this step.
        blocking: bool, the step belongs to a phase whose exchanges block (their wire may differ).
        epoch_end: bool, a mean of everything ends this step, and carries an epoch's loss.
    """

    phase: jax.Array
    period: jax.Array
    delay: jax.Array
    clock: jax.Array
    flush: jax.Array
    blocking: jax.Array
    epoch_end: jax.Array

    def posts(self, fragment: int = 0, fragments: int = 1) -> jax.Array:
        """Whether a fragment is posted after this step: each once in a period, taking turns."""
        turn = fragment * self.period // fragments
        return self.epoch_end | (jnp.mod(self.clock - turn, self.period) == 0)


class Schedule(NamedTuple):
    """When to post an exchange and how long to let it fly.

    Attributes:
        init: ``() -> state``, arrays only.
        plan: ``(state, step) -> (Plan, state)``; ``step`` is an int32 scalar counted from 0.
        observe: ``(state, loss) -> state``, called at the end of an epoch, unless its plan says
            ``blocking``, with the mean loss of that epoch over all nodes (float32 scalar), the
            same number on every node.
        longest: the longest period, in steps.
        delay_fills_period: whether an exchange may fly for as long as a whole period.
    """

    init: Callable[[], PyTree]
    plan: Callable[[PyTree, jax.Array], tuple[Plan, PyTree]]
    observe: Callable[[PyTree, jax.Array], PyTree]
    longest: int
    delay_fills_period: bool


class Posted(NamedTuple):
    """What this node has posted, while the sum it belongs to is still on its way.

    Attributes:
        step: after which optimizer step it was posted.
        header: float32[HEADER_SIZE].
        leaves: as they were sent, in their wire dtypes; rows of bytes with the wire int8.
    """

    step: int
    header: np.ndarray
    leaves: list[np.ndarray]


class Flown(NamedTuple):
    """An exchange that has ended; times are seconds of the monotonic clock, from and until.

    Attributes:
        number: which one.
        step: after which optimizer step it was posted.
        bytes_sent: by this process.
        fill: copying the parameters to the host, and casting them.
        flight: with the thread that exchanges.
        wait: training was blocked.
        take: copying the sums to the device; zeros while that goes on. With host callbacks JAX
            copies as well, before ``fill`` and after ``take``, which is not in here.
    """

    number: int
    step: int
    bytes_sent: int
    fill: tuple[float, float]
    flight: tuple[float, float]
    wait: tuple[float, float]
    take: tuple[float, float]


def _unchanged() -> None:
    """Processes that stay as they are."""


def nothing_flown() -> list[Flown]:
    """The history of an exchange of which the host sees nothing."""
    return []


def nothing_to_report() -> dict[str, float]:
    """The report of an exchange of which the host sees nothing."""
    return {"exchanges": 0, "bytes_sent": 0, "seconds_blocked": 0.0, "seconds_in_flight": 0.0}


def nothing_posted() -> dict[int, Posted]:
    """What is with the host, for an exchange that keeps everything in its state."""
    return {}


def _nothing_to_post(posted: dict[int, Posted]) -> None:
    if posted:
        raise ValueError(
            f"posted: exchanges {sorted(posted)} were in flight between processes, but this "
            "exchange keeps everything in its state; restore with an mpi_exchange."
        )


def _alone(flag: bool) -> bool:
    return flag


class Exchange(NamedTuple):
    """How bytes cross between nodes; the only part that knows a network.

    An exchange sums lists of arrays, and the header, a float32 vector of ``HEADER_SIZE`` that is
    never rounded, over all nodes. It is posted by ``start``, which returns at once where the
    network allows it, and collected by ``finish``.

    Attributes:
        num_nodes: members of the exchange, one per node.
        wire: dtype name forced on an algorithm's exchanges, or None: the algorithm chooses.
        init: ``(params) -> state`` of one exchange in flight, arrays only. Nodes whose params
            differ in structure, shape or dtype raise here.
        start: ``(state, number, step, leaves, header, wire) -> (state, number)``. ``number``
            (int32) counts the exchanges alike on all nodes, and the next one is returned; the
            Python int ``UNCOUNTED`` stands for an exchange that is finished at once. ``step``
            (int32) must be equal on all nodes, too. ``header[0]`` is 1, or 0: then this node's
            leaves count as zeros, whatever they hold.
        finish: ``(state, number, like) -> (sums, header, state)``; sums have the shapes of
            ``like`` and the dtype in which they were accumulated, float32 or float64. With the
            wire ``int8`` the part that this node has added up is not rounded yet: the node has
            to do it, and to remember what that takes away, which only it knows.
        broadcast: ``(leaves, root) -> leaves``, those of node ``root``, bit for bit.
        report: ``() -> dict`` of what the host saw: exchanges, bytes sent, seconds that
            exchanges were on their way, and seconds of them that training was blocked.
        history: ``() -> list`` of the last thousand exchanges that have ended, what took how long:
            ``number``, ``step``, ``bytes_sent``, and ``fill``, ``flight``, ``wait`` and ``take``,
            from and until, in seconds of the monotonic clock.
        posted: ``() -> dict`` by number, of what flies with the host and not in the state; a
            checkpoint needs both. Complete when the program that has posted has ended.
        post_again: the inverse, on all nodes together: what was posted flies once more, and what
            was still in flight is forgotten.
        anyone: ``(flag) -> bool``, whether any node said True, now or some calls ago, the same
            answer on all; on the host, outside jit, and called by all nodes at the same steps.
        compares: whether nodes are processes that could differ, and it compares the last numbers
            of their headers, ``AGREED``; otherwise these are not computed.
        same_bits: whether the last of them, what nodes share, is among these.
        topology: ``() -> Topology``, the processes that there are now, the same answer on all;
            None where they cannot change. Called by all nodes, on the host. ``num_nodes``, and
            the root of a broadcast, go on counting those that there were at first.
    """

    num_nodes: int
    wire: str | None
    init: Callable[[PyTree], PyTree]
    start: Callable[[PyTree, Number, Number, Leaves, jax.Array, str | None], tuple[PyTree, Number]]
    finish: Callable[[PyTree, Number, Leaves], tuple[Leaves, jax.Array, PyTree]]
    broadcast: Callable[[Leaves, int], Leaves]
    report: Callable[[], dict[str, float]] = nothing_to_report
    history: Callable[[], list[Flown]] = nothing_flown
    posted: Callable[[], dict[int, Posted]] = nothing_posted
    post_again: Callable[[dict[int, Posted]], None] = _nothing_to_post
    anyone: Callable[[bool], bool] = _alone
    compares: bool = False
    same_bits: bool = True
    topology: Callable[[], Any] = _unchanged


class Arrival(NamedTuple):
    """An exchange that is being merged.

    Attributes:
        total: sums over the nodes that contributed, float32 (float64 for float64 leaves).
        mean: the same, divided by how many they are.
        members: float32 scalar, how many nodes contributed: P, less those left out.
        age: int32 scalar, steps since the exchange was posted.
        sound: bool scalar, whether the leaves that are merged are the node's own; if not, it had
            lost them, and they are the mean.
    """

    total: Leaves
    mean: Leaves
    members: jax.Array
    age: jax.Array
    sound: jax.Array


def stay(leaves: Leaves, state: PyTree) -> Leaves:
    """Leaves a node's parameters as they are."""
    del state
    return leaves


def as_they_are(leaves: Leaves, state: PyTree) -> tuple[Leaves, PyTree]:
    """Sends a node's leaves themselves."""
    return leaves, state


class Merge(NamedTuple):
    """What an exchange does to a node's own parameters.

    Attributes:
        init: ``(params) -> state``, arrays only; with fragments, of each fragment, a tree in
            which :class:`optax.MaskedNode` stands for the leaves of the others.
        merge: ``(leaves, arrival, state) -> (leaves, state)``, when a sum arrives; leaves are
            the floating-point ones, in the dtype of ``arrival.total``.
        depart: ``(leaves, state) -> leaves``, at the moment the node has posted its leaves.
        message: ``(leaves, state) -> (message, state)``, what of the leaves is posted, in their
            shapes.
        own_weight: ``(arrival) -> w``, for the optimizer's memory ``m``, where it travels along:
            ``m <- w m + (1 - w) mean_i m_i``. None: it cannot.
        shared: whether its state is the same on all nodes, bit for bit, and has to be.
    """

    init: Callable[[PyTree], PyTree]
    merge: Callable[[Leaves, Arrival, PyTree], tuple[Leaves, PyTree]]
    depart: Callable[[Leaves, PyTree], Leaves] = stay
    own_weight: Callable[[Arrival], jax.Array | float] | None = None
    message: Callable[[Leaves, PyTree], tuple[Leaves, PyTree]] = as_they_are
    shared: bool = False


class Remembering(NamedTuple):
    """Parameters, and the optimizer's memory that travels with them; what the engine is handed."""

    params: PyTree
    memory: PyTree
