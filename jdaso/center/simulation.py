"""Asynchronous training on one device: workers around a simulated center take turns in an order."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jdaso.center.types import (
    Center,
    CenterExchange,
    CenterState,
    ServerRule,
    map_state,
    reply_header,
)
from jdaso.core.exchange import BoundExchange, Exchange, changed
from jdaso.core.state import find_state, map_states
from jdaso.core.tree import all_finite, split, where_tree, widened
from jdaso.core.types import Leaves, PyTree
from jdaso.core.validation import check_whole
from jdaso.core.wire import sum_dtype


class SimulatedState(NamedTuple):
    """The state of a worker's exchange with a simulated center."""

    center: Any  # the state of the server; () outside this worker's turns
    reply: Leaves  # to this worker's last message
    of: Any  # an empty array [num_workers, 0], whose shape is known while a program is traced


def simulated_center(num_workers: int) -> Center:
    """A center for workers that take turns in one program.

    The center applies a worker's message at once, and the reply stays in the worker's state until
    the delay is over. :func:`take_turns` runs the turns in any order. Results equal those of
    :func:`mpi_center` up to rounding.

    Args:
        num_workers: p in the papers, at least 1.

    Returns:
        A :class:`Center`. Its state is in the :class:`SimulatedCluster`.

    >>> import jdaso
    >>> jdaso.center.simulated_center(4).num_workers
    4
    """
    check_whole("num_workers", num_workers, 1)
    return _SimulatedCenter(num_workers)


class _SimulatedCenter(Center):
    in_turns = True

    def make_exchange(self, rule: ServerRule) -> Exchange:
        def init(params: PyTree, sharded: bool = True) -> SimulatedState:
            first = rule.init(split(widened(params))[0])
            reply = [jnp.zeros_like(x) for x in first.center]
            return SimulatedState(first, reply, jnp.zeros((self.num_workers, 0)))

        def post(state, number, step, leaves: Leaves, header, wire):
            old = state.center
            new = rule.update(old, [x.astype(sum_dtype(x.dtype)) for x in leaves])
            center, reply = where_tree(header[0] > 0, new, (old, old.center))
            return state._replace(center=center, reply=reply), number + 1

        def collect(state, number, like, part=None):
            header = jnp.array(reply_header(all_finite(state.reply)), jnp.float32)
            return state.reply, header, state

        bound = changed(BoundExchange(), post=post, collect=collect)
        exchange = CenterExchange(self.num_workers)
        return changed(exchange, init=init, bind=lambda names, leaves: bound)

    def join(self, params: PyTree, saved: CenterState | None = None) -> PyTree:
        return params if saved is None else self.read(params)  # all start from the same

    def read(self, params: PyTree) -> CenterState:
        raise ValueError(
            "the state of a simulated center is part of the cluster: read cluster.center, replace "
            "it with cluster._replace(center=...)."
        )

    def write(self, state: CenterState) -> None:
        self.read(state)


class SimulatedCluster(NamedTuple):
    """All workers and the center between two turns. It holds arrays only and can be checkpointed.

    Attributes:
        params: Parameters of all workers. Each leaf has a leading axis of workers.
        opt_state: Optimizer states of all workers, likewise.
        center: The state of the server, with lists of the floating-point leaves.
    """

    params: PyTree
    opt_state: PyTree
    center: CenterState


def init_cluster(
    tx: optax.GradientTransformation, params: PyTree, num_workers: int
) -> SimulatedCluster:
    """Workers and a center that start from the same parameters.

    Args:
        tx: A complete optimizer with one algorithm that uses a :func:`simulated_center`.
        params: A tree of arrays.
        num_workers: p in the papers.

    Raises:
        ValueError: if ``tx`` does not have exactly one simulated center, or if its center is for
            another number of workers.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> center = jdaso.center.simulated_center(4)
    >>> tx = jdaso.chain(optax.sgd(0.1), jdaso.center.async_easgd(center, period=1))
    >>> jdaso.center.init_cluster(tx, jnp.ones(3), 4).params.shape
    (4, 3)
    """
    opt_state = tx.init(params)
    simulated = find_state(SimulatedState, opt_state)
    if (made_for := simulated.of.shape[0]) != num_workers:
        raise ValueError(
            f"init_cluster got num_workers={num_workers}, but simulated_center was made for "
            f"{made_for}. Pass the same number to both."
        )
    one = (params, _with_center(opt_state, ()))
    params, opt_state = jax.tree.map(lambda x: jnp.stack([x] * num_workers), one)
    return SimulatedCluster(params, opt_state, simulated.center)


def take_turns(
    step: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]],
    cluster: SimulatedCluster,
    order: jax.Array | np.ndarray,
    batches: PyTree,
) -> tuple[SimulatedCluster, Any]:
    """Runs one optimizer step per turn, in one scan. Call it inside jit.

    Args:
        step: ``(params, opt_state, batch) -> (params, opt_state, output)``, the training step of
            one worker, as it would run over MPI.
        cluster: The result of :func:`init_cluster` or of the previous call.
        order: int32[turns], the worker of each turn, such as that of :func:`round_robin`.
        batches: A tree whose leaves have a leading axis of turns.

    Returns:
        The cluster after the last turn, and the outputs with a leading axis of turns.

    Raises:
        ValueError: if ``order`` contains a number that is no worker, or if the leading axis of
            ``batches`` has another length.

    >>> import jax, jax.numpy as jnp, jdaso, optax
    >>> center = jdaso.center.simulated_center(2)
    >>> tx = jdaso.chain(optax.sgd(0.5), jdaso.center.downpour(center, period=1))
    >>> def step(params, opt_state, batch):
    ...     updates, opt_state = tx.update(params - batch, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state, params
    >>> cluster = jdaso.center.init_cluster(tx, jnp.float32(8), 2)
    >>> order = jdaso.center.round_robin(2, 4)
    >>> cluster, seen = jax.jit(lambda c: jdaso.center.take_turns(step, c, order, jnp.zeros(4)))(
    ...     cluster)
    >>> seen.tolist(), float(cluster.center.center[0])  # the second starts from the first center
    ([8.0, 8.0, 4.0, 0.0], -2.0)
    """
    if not isinstance(order, jax.core.Tracer):
        workers, numbers = len(jax.tree.leaves(cluster.params)[0]), np.asarray(order)
        if not np.issubdtype(numbers.dtype, np.integer) or (
            numbers.size and not 0 <= numbers.min() <= numbers.max() < workers
        ):
            raise ValueError(
                f"order must hold integers from 0 to {workers - 1}, one worker each, got "
                f"{numbers.dtype} from {numbers.min()} to {numbers.max()}."
            )
    for leaf in jax.tree.leaves(batches):
        if np.shape(leaf)[:1] != (len(order),):
            raise ValueError(
                f"batches must have a leading axis of {len(order)} turns, like order, got "
                f"{type(leaf).__name__} of shape {np.shape(leaf)}."
            )

    def turn(cluster: SimulatedCluster, worker_and_batch):
        worker, batch = worker_and_batch
        workers = (cluster.params, cluster.opt_state)
        params, opt_state = jax.tree.map(lambda x: x[worker], workers)
        params, opt_state, output = step(params, _with_center(opt_state, cluster.center), batch)
        one = (params, _with_center(opt_state, ()))
        params, states = jax.tree.map(lambda xs, x: xs.at[worker].set(x), workers, one)
        return SimulatedCluster(params, states, center_of(opt_state)), output

    return lax.scan(turn, cluster, (jnp.asarray(order, jnp.int32), batches))


def _with_center(opt_state: PyTree, center: Any) -> PyTree:
    return map_states(SimulatedState, lambda state: state._replace(center=center), opt_state)


def center_of(opt_state: PyTree) -> Any:
    """The state of the server, in the state of the worker whose turn it is."""
    return find_state(SimulatedState, opt_state).center


def read_center(cluster: SimulatedCluster) -> CenterState:
    """The state of the server as trees like one worker's parameters, like :attr:`Center.read`.

    >>> import jax.numpy as jnp, jdaso
    >>> center = jdaso.center.simulated_center(2)
    >>> tx = jdaso.center.downpour(center, period=1)
    >>> read_center(init_cluster(tx, {"w": jnp.ones(3)}, 2)).center["w"].tolist()
    [1.0, 1.0, 1.0]
    """
    _, where = split(jax.tree.map(lambda x: x[0], cluster.params))
    return map_state(where, cluster.center)


def round_robin(num_workers: int, turns: int) -> np.ndarray:
    """The order in which all workers take turns one after the other (easgd Eq. 12), int32[turns].

    >>> round_robin(3, 5).tolist()
    [0, 1, 2, 0, 1]
    """
    check_whole("num_workers", num_workers, 1)
    check_whole("turns", turns, 0)
    return np.arange(turns, dtype=np.int32) % num_workers


def random_order(num_workers: int, turns: int, seed: int = 0) -> np.ndarray:
    """An order in which each turn's worker is drawn uniformly, int32[turns].

    >>> bool((random_order(3, 100) < 3).all())
    True
    """
    check_whole("num_workers", num_workers, 1)
    check_whole("turns", turns, 0)
    return np.random.default_rng(seed).integers(num_workers, size=turns, dtype=np.int32)
