"""Asynchronous training on one device: workers take turns, in a given order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jdaso._base import PyTree
from jdaso._center import CenterState, mapped
from jdaso._checks import check_whole
from jdaso._leaves import split
from jdaso.center._simulation import center_of, with_center, workers_of


class Cluster(NamedTuple):
    """All workers and the centre, between two turns; arrays only, so it checkpoints as it is.

    Attributes:
        params: each leaf has a leading axis of workers.
        opt_state: the same.
        center: what the server keeps; lists of the floating-point leaves, in their order.
    """

    params: PyTree
    opt_state: PyTree
    center: CenterState


def gather(tx: optax.GradientTransformation, params: PyTree, num_workers: int) -> Cluster:
    """So many workers, and the centre, that all start from the same parameters.

    Args:
        tx: a whole optimizer, with one algorithm of a :func:`jdaso.simulated_center` in it.
        params: a tree of arrays.
        num_workers: p in the papers.

    Returns:
        A :class:`Cluster`.

    Raises:
        ValueError: if ``tx`` has no simulated centre, more than one, or one for another number of
            workers.

    >>> import jax.numpy as jnp, jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.1), jdaso.async_easgd(jdaso.simulated_center(4), period=1))
    >>> jdaso.center.gather(tx, jnp.ones(3), 4).params.shape
    (4, 3)
    """
    check_whole("num_workers", num_workers, 1)
    opt_state = tx.init(params)
    center = center_of(opt_state)
    if workers_of(opt_state) != num_workers:
        raise ValueError(
            f"num_workers is {num_workers}, but the centre of tx is simulated_center("
            f"{workers_of(opt_state)}); alpha depends on it. Give both the same number."
        )
    one = (params, with_center(opt_state, ()))
    params, opt_state = jax.tree.map(lambda x: jnp.stack([x] * num_workers), one)
    return Cluster(params, opt_state, center)


def take_turns(
    step: Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree, Any]],
    cluster: Cluster,
    order: jax.Array | np.ndarray,
    batches: PyTree,
) -> tuple[Cluster, Any]:
    """Lets workers take their turns, one optimizer step each; one scan, to be called inside jit.

    Args:
        step: ``(params, opt_state, batch) -> (params, opt_state, output)`` of one worker, the
            training step one would run over MPI.
        cluster: from :func:`gather`, or from the last call.
        order: int32[turns], whose turn it is: :func:`round_robin`, :func:`random_order`, or any.
        batches: a tree whose leaves have a leading axis of turns; what each turn is given.

    Returns:
        The cluster afterwards, and the outputs, with a leading axis of turns.

    Raises:
        ValueError: for an order that names a worker there is not, or batches of another length.

    >>> import jax, jax.numpy as jnp, jdaso, optax
    >>> tx = optax.chain(optax.sgd(0.5), jdaso.downpour(jdaso.simulated_center(2), period=1))
    >>> def step(params, opt_state, batch):
    ...     updates, opt_state = tx.update(params - batch, opt_state, params)
    ...     return optax.apply_updates(params, updates), opt_state, params
    >>> cluster = jdaso.center.gather(tx, jnp.float32(8), 2)
    >>> order = jdaso.center.round_robin(2, 4)
    >>> cluster, seen = jax.jit(lambda c: jdaso.center.take_turns(step, c, order, jnp.zeros(4)))(
    ...     cluster)
    >>> seen.tolist(), float(cluster.center.center[0])  # the second starts from the first centre
    ([8.0, 8.0, 4.0, 0.0], -2.0)
    """

    _check_order(order, len(jax.tree.leaves(cluster.params)[0]))
    for leaf in jax.tree.leaves(batches):
        if np.shape(leaf)[:1] != (len(order),):
            raise ValueError(
                f"batches must have a leading axis of {len(order)} turns, as long as order, got "
                f"{type(leaf).__name__} of shape {np.shape(leaf)}."
            )

    def turn(cluster: Cluster, given):
        worker, batch = given
        every = (cluster.params, cluster.opt_state)
        params, opt_state = jax.tree.map(lambda x: x[worker], every)
        params, opt_state, output = step(params, with_center(opt_state, cluster.center), batch)
        one = (params, with_center(opt_state, ()))
        params, states = jax.tree.map(lambda xs, x: xs.at[worker].set(x), every, one)
        return Cluster(params, states, center_of(opt_state)), output

    return lax.scan(turn, cluster, (jnp.asarray(order, jnp.int32), batches))


def read(cluster: Cluster) -> CenterState:
    """The centre as trees like one worker's parameters, as ``read`` of a centre over MPI gives it.

    >>> import jax.numpy as jnp, jdaso
    >>> tx = jdaso.downpour(jdaso.simulated_center(2), period=1)
    >>> read(gather(tx, {"w": jnp.ones(3)}, 2)).center["w"].tolist()
    [1.0, 1.0, 1.0]
    """
    _, where = split(jax.tree.map(lambda x: x[0], cluster.params))
    return mapped(where, cluster.center)


def _check_order(order: jax.Array | np.ndarray, workers: int) -> None:
    if isinstance(order, jax.core.Tracer):
        return
    order = np.asarray(order)
    whole = np.issubdtype(order.dtype, np.integer)
    if not whole or (order.size and not 0 <= order.min() <= order.max() < workers):
        raise ValueError(
            f"order must hold whole numbers from 0 to {workers - 1}, one worker each, got "
            f"{order.dtype} from {order.min()} to {order.max()}."
        )


def round_robin(num_workers: int, turns: int) -> np.ndarray:
    """The order in which each worker has one turn after the other, int32[turns] (easgd Eq. 12).

    >>> round_robin(3, 5).tolist()
    [0, 1, 2, 0, 1]
    """
    check_whole("num_workers", num_workers, 1)
    check_whole("turns", turns, 0)
    return np.arange(turns, dtype=np.int32) % num_workers


def random_order(num_workers: int, turns: int, seed: int = 0) -> np.ndarray:
    """An order in which any worker may be next, int32[turns].

    >>> bool((random_order(3, 100) < 3).all())
    True
    """
    check_whole("num_workers", num_workers, 1)
    check_whole("turns", turns, 0)
    return np.random.default_rng(seed).integers(num_workers, size=turns, dtype=np.int32)
