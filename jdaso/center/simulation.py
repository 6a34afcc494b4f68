"""A center inside the program, which applies messages at once and keeps replies in the states."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdaso.center.types import Center, ServerRule, no_broadcast, reply_header
from jdaso.core.exchange import Exchange
from jdaso.core.state import find_state, map_states
from jdaso.core.tree import all_finite, split, widened
from jdaso.core.types import Leaves, PyTree
from jdaso.core.validation import check_whole
from jdaso.core.wire import sum_dtype


class SimulatedState(NamedTuple):
    """The state of a worker's exchange with a simulated center."""

    center: Any  # the state of the server; () outside this worker's turns
    reply: Leaves  # to this worker's last message
    of: Any  # an empty array [num_workers, 0], whose shape is known while a program is traced


def _simulated_exchange(num_workers: int, rule: ServerRule) -> Exchange:
    """An exchange with a simulated center whose server updates with ``rule``."""

    def init(params: PyTree) -> SimulatedState:
        first = rule.init(split(widened(params))[0])
        reply = [jnp.zeros_like(x) for x in first.center]
        return SimulatedState(first, reply, jnp.zeros((num_workers, 0)))

    def start(state, number, step, leaves: Leaves, header, wire):
        old = state.center
        new = rule.update(old, [x.astype(sum_dtype(x.dtype)) for x in leaves])
        center, reply = jax.tree.map(
            lambda n, o: jnp.where(header[0] > 0, n, o), new, (old, old.center)
        )
        return state._replace(center=center, reply=reply), number + 1

    def finish(state, number, like):
        header = jnp.array(reply_header(all_finite(state.reply)), jnp.float32)
        return state.reply, header, state

    return Exchange(num_workers, None, init, start, finish, no_broadcast)


def simulated_center(num_workers: int) -> Center:
    """A center for workers that take turns in one program.

    The center applies a worker's message at once. The reply stays in the worker's state until the
    delay is over. :func:`jdaso.center.take_turns` runs the turns in any order. Results equal those
    of :func:`jdaso.center.mpi_center` up to rounding.

    Args:
        num_workers: p in the papers.

    Returns:
        A :class:`jdaso.center.Center`. Its state is in the :class:`jdaso.center.SimulatedCluster`.

    Raises:
        ValueError: for fewer than one worker.

    >>> import jdaso
    >>> jdaso.center.simulated_center(4).num_workers
    4
    """
    check_whole("num_workers", num_workers, 1)
    make_exchange = functools.partial(_simulated_exchange, num_workers)
    return Center(num_workers, in_turns=True, make_exchange=make_exchange)


def with_center(opt_state: PyTree, center: Any) -> PyTree:
    """A worker's state with the state of the server in it, or () to remove that."""
    return map_states(SimulatedState, lambda state: state._replace(center=center), opt_state)


def center_of(opt_state: PyTree) -> Any:
    """The state of the server in the state of the worker whose turn it is."""
    return find_state(SimulatedState, opt_state).center
