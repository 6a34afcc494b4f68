"""Trains one small network on a virtual cluster, to study an algorithm of jdaso.

    data = study.digits()
    result = study.train(
        data,
        lambda exchange: jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, period=4, delay=1)),
        nodes=8, batch_size=16, epochs=24,
    )

A virtual cluster runs all nodes on one device. Each node is a position on an axis of ``jax.vmap``.
The arithmetic is that of a real cluster, including the rounding on the wire.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from image_folders import Images as Images
from image_folders import batches as batches
from image_folders import digits as digits
from image_folders import folder as folder
from jax import lax
from small_cnn import SmallCNN as SmallCNN

from jdaso.core.chain import apply_gradients, drain
from jdaso.core.consensus import consensus
from jdaso.core.exchange import BoundExchange, Exchange, changed
from jdaso.core.state import averaging_state
from jdaso.core.transformation import Averaging
from jdaso.core.types import PyTree
from jdaso.core.wire import wire_dtypes, wire_shape
from jdaso.exchange.axis import axis_exchange

AXIS = "node"
TEST_BATCH = 500


class Result(NamedTuple):
    """The results of a training.

    Attributes:
        losses: float32[steps], the training loss, averaged over the nodes.
        bytes_sent: int64[steps], the bytes that one node has sent up to each step.
        accuracy: Accuracy of the evaluated parameters on the test images.
        exchanges: Number of exchanges. Each fragment of the parameters counts as one.
        waits: Number of exchanges with delay 0, for which training waited.
    """

    losses: np.ndarray
    bytes_sent: np.ndarray
    accuracy: float
    exchanges: int
    waits: int


def train(
    data: Images,
    make_optimizer: Callable[[Exchange], Averaging],
    nodes: int,
    batch_size: int,
    epochs: int,
    seed: int = 0,
    evaluated: Callable[[PyTree, PyTree], PyTree] | None = None,
    model: SmallCNN | None = None,
) -> Result:
    """Trains one network on a virtual cluster.

    Args:
        data: The images. All nodes share them, see :func:`batches`.
        make_optimizer: ``exchange -> transformation``, a result of :func:`jdaso.chain` or
            :func:`jdaso.eamsgd`. Exchanges that are still in flight after the last step are merged.
        nodes: Number of nodes.
        batch_size: Images per node and step.
        epochs: Number of passes over the images.
        seed: Seed of the initial parameters and of the batches.
        evaluated: ``(opt_state, params) -> params``, the parameters of the first node to test. By
            default the mean of the parameters over all nodes is tested. For EASGD and EAMSGD it
            should be the center.
        model: The network. By default the smallest :class:`SmallCNN` for these classes.

    Returns:
        The losses, bytes, accuracy and numbers of exchanges as a :class:`Result`.

    >>> import jdaso, optax
    >>> def make_optimizer(exchange):
    ...     return jdaso.chain(optax.sgd(0.05), jdaso.local_sgd(exchange, period=4))
    >>> result = train(digits(), make_optimizer, nodes=4, batch_size=32, epochs=1)
    >>> len(result.losses), result.exchanges, int(result.bytes_sent[-1])
    (11, 2, 73080)
    """
    order = batches(len(data.labels), nodes, batch_size, epochs, seed)
    exchange = counting(axis_exchange(AXIS, nodes))
    transformation = make_optimizer(exchange)
    model = model or SmallCNN(num_classes=int(data.labels.max()) + 1)
    first = model.init(jax.random.key(seed), jnp.asarray(data.images[:1]))

    def loss_fn(params, images, labels):
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        params, opt_state = apply_gradients(transformation, grads, opt_state, params, value=loss)
        state = averaging_state(opt_state)
        counts = loss, _bytes_sent(opt_state), state.exchanges, state.plan.delay == 0
        return (params, opt_state), counts

    def node(images, labels, order):
        (params, opt_state), counts = lax.scan(
            lambda carry, indices: step(carry, (images[indices], labels[indices])),
            (first, transformation.init(first)),
            order,
        )
        params, opt_state = drain(transformation, opt_state, params)
        if evaluated is None:
            return consensus(exchange, params), counts
        return evaluated(opt_state, params), counts

    cluster = jax.jit(jax.vmap(node, in_axes=(None, None, 1), axis_name=AXIS))
    params, counts = cluster(data.images, data.labels, order)
    losses, total, exchanges, blocking = jax.device_get(counts)
    posted = np.diff(exchanges[0], prepend=0)
    # The count overflows at 2^32, but the difference of two steps does not.
    sent = np.diff(total[0], prepend=np.uint32(0)).astype(np.int64).cumsum()
    params = jax.tree.map(lambda x: x[0], params)
    return Result(
        losses=losses.mean(axis=0),
        bytes_sent=sent,
        accuracy=accuracy(model, params, data.test_images, data.test_labels),
        exchanges=int(posted.sum()),
        waits=int(posted[blocking[0]].sum()),
    )


def accuracy(model: SmallCNN, params: PyTree, images: np.ndarray, labels: np.ndarray) -> float:
    """The fraction of the images that the network classifies correctly.

    >>> import jax
    >>> data, model = digits(), SmallCNN()
    >>> params = model.init(jax.random.key(0), data.test_images)
    >>> accuracy(model, params, data.test_images, data.test_labels) < 0.5
    True
    """
    return float(_is_correct(model, params, images, labels).mean())


@functools.partial(jax.jit, static_argnums=0)
def _is_correct(model: SmallCNN, params: PyTree, images: jax.Array, labels: jax.Array):
    def is_correct(example):
        image, label = example
        return model.apply(params, image[None])[0].argmax() == label

    # In batches, to limit the memory.
    return lax.map(is_correct, (images, labels), batch_size=TEST_BATCH)


class CountingState(NamedTuple):
    """State of :func:`counting`: that of the inner exchange, and the bytes sent modulo 2^32."""

    exchange: PyTree
    bytes_sent: jax.Array


def counting(exchange: Exchange) -> Exchange:
    """An exchange whose state also counts the bytes that a node would send with MPI.

    For n bytes on the wire each of P nodes sends ``2 (P-1)/P n`` bytes. The small header of an
    exchange is not counted.
    """

    def init(params, sharded=True):
        return CountingState(exchange.init(params, sharded), jnp.zeros((), jnp.uint32))

    def bind(names, leaves):
        return _counting(exchange.bind(names, leaves), exchange.num_nodes)

    return changed(exchange, init=init, bind=bind)


def _counting(exchange: BoundExchange, nodes: int) -> BoundExchange:
    def post(state, number, step, leaves, header, wire, **options):
        dtypes = wire_dtypes([x.dtype for x in leaves], wire)
        size = sum(_wire_bytes(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True))
        sent = 2 * (nodes - 1) * size // nodes
        sent_now = number, step, leaves, header, wire
        inner, number = exchange.post(state.exchange, *sent_now, **options)
        return CountingState(inner, state.bytes_sent + jnp.uint32(sent)), number

    def collect(state, number, like, part=None):
        sums, header, inner = exchange.collect(state.exchange, number, like)
        return sums, header, state._replace(exchange=inner)

    return changed(exchange, post=post, collect=collect)


def _wire_bytes(leaf: jax.Array, dtype: np.dtype) -> int:
    return math.prod(wire_shape(leaf.shape, dtype)) * dtype.itemsize


def _bytes_sent(opt_state: PyTree) -> jax.Array:
    """The bytes that one node has sent so far for all fragments of the parameters."""
    states = [fragment.exchange for fragment in averaging_state(opt_state).fragments]
    counted = [state.bytes_sent for state in states if isinstance(state, CountingState)]
    return sum(counted, jnp.zeros((), jnp.uint32))
