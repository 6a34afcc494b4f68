"""A centre inside the program: messages are taken at once, replies wait in the workers' states."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdaso._base import Exchange, Leaves, PyTree
from jdaso._center import REPLY_HEADER, Center, Rule, no_broadcast
from jdaso._checks import check_whole
from jdaso._leaves import split, widened
from jdaso._state import the_state
from jdaso._wire import sum_dtype


class SimulatedState(NamedTuple):
    """What a worker's state holds of the centre.

    Attributes:
        center: () outside this worker's turns.
        reply: that this worker waits for.
        of: [num_workers, 0], no numbers; its shape is known also while a program is traced.
    """

    center: Any
    reply: Leaves
    of: Any


def simulated_center(num_workers: int) -> Center:
    """Workers that meet the centre one after the other, in one program.

    What a worker sends is taken at once, and its reply waits in its state for as long as the
    delay says. :func:`jdaso.center.take_turns` lets the workers take turns, in any order. The
    arithmetic is that of :func:`jdaso.mpi_center`, but for the last bits.

    Args:
        num_workers: p in the papers.

    Returns:
        A :class:`jdaso.Center`. The centre itself is that of :class:`jdaso.center.Cluster`.

    Raises:
        ValueError: for fewer than one worker.

    >>> import jdaso
    >>> jdaso.simulated_center(4).num_workers
    4
    """
    check_whole("num_workers", num_workers, 1)

    def serve(rule: Rule) -> Exchange:
        def init(params: PyTree) -> SimulatedState:
            first = rule.init(split(widened(params))[0])
            reply = [jnp.zeros_like(x) for x in first.center]
            return SimulatedState(first, reply, jnp.zeros((num_workers, 0)))

        def start(state, number, step, leaves: Leaves, header, wire):
            del step, wire
            wide = [x.astype(sum_dtype(x.dtype)) for x in leaves]
            old = state.center
            new = rule.update(old, wide)
            contributes = header[0] > 0
            center, reply = jax.tree.map(
                lambda n, o: jnp.where(contributes, n, o), new, (old, old.center)
            )
            return state._replace(center=center, reply=reply), number + 1

        def finish(state, number, like):
            del number, like
            return state.reply, jnp.array(REPLY_HEADER, jnp.float32), state

        return Exchange(num_workers, None, init, start, finish, no_broadcast)

    return Center(num_workers, in_turns=True, serve=serve)


def with_center(opt_state: PyTree, center: Any) -> PyTree:
    """The state of a worker whose turn it is, or, with (), is over."""

    def is_one(node):
        return isinstance(node, SimulatedState)

    return jax.tree.map(
        lambda node: node._replace(center=center) if is_one(node) else node,
        opt_state,
        is_leaf=is_one,
    )


def center_of(opt_state: PyTree) -> Any:
    """The centre in the state of a worker whose turn it is."""
    return the_state(SimulatedState, opt_state).center


def workers_of(opt_state: PyTree) -> int:
    """For how many workers the centre was made of which a new state is."""
    return the_state(SimulatedState, opt_state).of.shape[0]
