"""A centre, where asynchronous workers meet one after the other, as data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jdaso._base import HEADER_SIZE, Exchange, Leaves, PyTree


class CenterState(NamedTuple):
    """What a server keeps; lists of leaves there, trees like the parameters where it is read.

    Attributes:
        center: c, float32 (float64 for float64 leaves).
        velocity: v of :func:`jdaso.mdownpour`, in the shapes of c; elsewhere ().
        average: z of :func:`jdaso.adownpour` and :func:`jdaso.mvadownpour`; elsewhere ().
        clock: int32, how often c was updated, the master's clock.
    """

    center: Any
    velocity: Any
    average: Any
    clock: Any


def mapped(function: Callable[[Any], Any], state: CenterState) -> CenterState:
    """A state with a function of its leaves, or trees; what a rule does not keep stays ().

    >>> mapped(sum, CenterState([1, 2], (), [3], 7))
    CenterState(center=3, velocity=(), average=3, clock=7)
    """
    fields = {"center": state.center, "velocity": state.velocity, "average": state.average}
    kept = {name: x for name, x in fields.items() if not (isinstance(x, tuple) and x == ())}
    return state._replace(**{name: function(x) for name, x in kept.items()})


class Rule(NamedTuple):
    """What a server does with a message; the same for NumPy's arrays and JAX's.

    Attributes:
        name: with all numbers in it; workers whose rules have other names are refused.
        init: ``(leaves) -> state``, with the first centre.
        update: ``(state, message) -> (state, reply)``, lists of as many leaves as the centre,
            in its shapes and dtypes; atomic.
    """

    name: str
    init: Callable[[list[Any]], CenterState]
    update: Callable[[CenterState, list[Any]], tuple[CenterState, list[Any]]]


def nothing_gone() -> dict[str, Any]:
    """The report of a centre of which the host sees nothing."""
    return {"workers": {}, "ended": [], "failed": [], "gone": []}


def start_alike(params: PyTree, saved: CenterState | None = None) -> PyTree:
    """The parameters as they are, where all workers were given the same."""
    if saved is not None:
        _not_here()
    return params


def nobody() -> None:
    """Waits for nobody."""


def _not_here(*_: Any) -> Any:
    raise ValueError(
        "a simulated centre lies in the program's own state: read cluster.center, replace it by "
        "cluster._replace(center=...)."
    )


class Center(NamedTuple):
    """How workers reach the centre; the asynchronous counterpart of an :class:`jdaso.Exchange`.

    Attributes:
        num_workers: p in the papers.
        in_turns: whether nobody comes between two exchanges of one step of a worker.
        serve: ``(rule) -> Exchange``, on which a sum is the server's reply to this worker alone.
        join: ``(params, saved=None) -> params``, the centre as it is now, which node 0 founds:
            from its parameters or, of a training that is resumed, from what ``read`` gave. Others
            wait for that, and what they give is not looked at. Who joins again starts anew, with
            ``tx.init``.
        read: ``(params) -> CenterState`` of trees like ``params``, as it is now, NumPy's arrays.
        write: ``(CenterState)``, replaces it while workers train.
        wait: ``()``, on node 0, until all other workers have ended, failed, or are gone; on others
            nothing.
        report: ``() -> dict``, on node 0: ``workers``, the exchanges of each, and lists of those
            that have ``ended``, that ``failed``, by an exception, and that are ``gone``, dead or
            silent for too long.
    """

    num_workers: int
    in_turns: bool
    serve: Callable[[Rule], Exchange]
    join: Callable[..., PyTree] = start_alike
    read: Callable[[PyTree], CenterState] = _not_here
    write: Callable[[CenterState], None] = _not_here
    wait: Callable[[], None] = nobody
    report: Callable[[], dict[str, Any]] = nothing_gone


def no_broadcast(leaves: Leaves, root: int) -> Leaves:
    """Raises: workers have a clock each, and never meet."""
    del leaves, root
    raise ValueError(
        "workers of a centre never meet: there is no broadcast and no consensus between them; use "
        "center.join and center.read."
    )


#: The header of a reply: one member, the server, and nothing else.
REPLY_HEADER = (1.0,) + (0.0,) * (HEADER_SIZE - 1)
