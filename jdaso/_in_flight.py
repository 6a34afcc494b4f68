"""What is in flight as a tree that can be saved, and states from which it is taken out."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdaso._base import AGREED, HEADER_SIZE, Posted, PyTree
from jdaso._state import AveragingState, Flight


def split(posted: dict[int, Posted]) -> dict[str, Any]:
    """What ``exchange.posted()`` returned, as named arrays.

    >>> sorted(split({7: Posted(3, np.zeros(3, np.float32), [np.ones(2)])}))
    ['7.header', '7.leaf.0', '7.step']
    """
    arrays: dict[str, Any] = {}
    for number, (step, header, leaves) in posted.items():
        arrays[f"{number}.step"] = np.int64(step)
        arrays[f"{number}.header"] = header
        arrays |= {f"{number}.leaf.{i}": leaf for i, leaf in enumerate(leaves)}
    return arrays


def joined(arrays: dict[str, np.ndarray]) -> dict[int, Posted]:
    """The inverse of :func:`split`.

    Raises:
        ValueError: for arrays that it has not made.
    """
    posted = {}
    left = dict(arrays)
    for number in sorted({int(name.partition(".")[0]) for name in arrays}):
        count = sum(name.startswith(f"{number}.leaf.") for name in arrays)
        names = ["step", "header", *(f"leaf.{i}" for i in range(count))]
        if missing := [name for name in names if f"{number}.{name}" not in left]:
            raise ValueError(f"exchange {number} has no {missing[0]}")
        step, header, *leaves = (left.pop(f"{number}.{name}") for name in names)
        if step.shape != () or header.shape != (HEADER_SIZE,):
            raise ValueError(f"exchange {number} has a header of shape {header.shape}")
        posted[number] = Posted(int(step), header, leaves)
    if left:
        raise ValueError(f"{min(left)} belongs to no exchange")
    return posted


def outlines(posted: dict[int, Posted]) -> dict[int, str]:
    """What must be the same on all nodes of what is in flight.

    >>> outlines({7: Posted(3, np.zeros(HEADER_SIZE, np.float32), [np.ones(2)])})
    {7: 'step 3, [0, 0, 0, 0, 0], 1 leaf (20e9ac1a)'}
    """
    return {number: _outline(exchange) for number, exchange in posted.items()}


def _outline(posted: Posted) -> str:
    agreed = [int(x) for x in posted.header[-len(AGREED) :]]
    shapes = "; ".join(f"{leaf.dtype.name}{leaf.shape}" for leaf in posted.leaves)
    leaves = "1 leaf" if len(posted.leaves) == 1 else f"{len(posted.leaves)} leaves"
    return f"step {posted.step}, {agreed}, {leaves} ({zlib.crc32(shapes.encode()):08x})"


def without_exchanges(tree: PyTree) -> PyTree:
    """A tree without what its algorithms' exchanges hold, which other nodes cannot take over."""
    return _map_flights(lambda flight: flight._replace(exchange=()), tree)


def of_exchanges(name: str) -> bool:
    """Whether the leaf of this name is what :func:`without_exchanges` takes away.

    >>> of_exchanges("opt_state.1.flights.0.exchange.sums.w")
    True
    """
    return re.search(r"(^|\.)flights\.\d+\.exchange(\.|$)", name) is not None


def grounded(tree: PyTree, like: PyTree) -> PyTree:
    """A tree with nothing in flight, on the exchanges of another one; what flew is not merged."""
    idle = iter([flight.exchange for state in _states(like) for flight in state.flights])

    def land(flight: Flight) -> Flight:
        return flight._replace(posted=jnp.zeros_like(flight.posted), exchange=next(idle))

    return _map_flights(land, tree)


def at_step(tree: PyTree, step: int) -> PyTree:
    """A tree whose algorithms are at another step.

    For a training that goes on with another number of nodes: an epoch then has another number of
    steps, and a schedule counts steps.

    Args:
        tree: any tree with optimizer states in it.
        step: optimizer steps taken, by the new count.

    >>> import jdaso
    >>> averaging = jdaso.daso(jdaso.single_exchange(), jdaso.constant(period=4, delay=2))
    >>> state = at_step(averaging.init({"w": jnp.ones(3)}), 100)
    >>> int(state.step)
    100
    """

    def move(state: AveragingState) -> AveragingState:
        at = np.asarray(step, state.step.dtype)
        return state._replace(step=jax.device_put(at, state.step.sharding))

    return _map_states(move, tree)


def _map_flights(function: Callable[[Flight], Flight], tree: PyTree) -> PyTree:
    def move(state: AveragingState) -> AveragingState:
        return state._replace(flights=tuple(map(function, state.flights)))

    return _map_states(move, tree)


def _is_state(node: Any) -> bool:
    return isinstance(node, AveragingState)


def _states(tree: PyTree) -> list[AveragingState]:
    return [node for node in jax.tree.leaves(tree, is_leaf=_is_state) if _is_state(node)]


def _map_states(function: Callable[[AveragingState], AveragingState], tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: function(x) if _is_state(x) else x, tree, is_leaf=_is_state)
