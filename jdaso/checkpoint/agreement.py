"""Agreement between processes: the same value, or the same error, on all of them."""

from collections.abc import Callable
from typing import Any

from jdaso.cluster.barrier import barrier
from jdaso.cluster.ranks import MAX_NAMES
from jdaso.cluster.topology import Topology
from jdaso.core.types import JdasoError


def from_first(topology: Topology, value: Any) -> Any:
    """The value of rank 0, on all processes."""
    return value if topology.comm is None else topology.comm.bcast(value, 0)


def gathered(topology: Topology, value: Any) -> list[Any]:
    """The values of all processes, by rank, on all processes."""
    return [value] if topology.comm is None else topology.comm.allgather(value)


def on_all(topology: Topology, purpose: str, function: Callable[[], Any]) -> Any:
    """This process's result of the function; an error on all processes if it raises on one.

    The error is a ValueError if one of theirs is, and otherwise a JdasoError. Errors of the barrier
    after the calls name the ``purpose``.
    """
    value = problem = kind = None
    try:
        value = function()
    except Exception as error:
        problem, kind = f"{topology.describe(topology.rank)}: {error}", type(error)
    barrier(topology, purpose)
    if problems := [text for text in gathered(topology, problem) if text]:
        kind = ValueError if any(gathered(topology, kind is ValueError)) else JdasoError
        more = len(problems) - MAX_NAMES
        texts = problems[:MAX_NAMES] + [f"and {more} more processes"] * (more > 0)
        raise kind("; ".join(texts))
    return value
