"""Studies of algorithms on a virtual cluster: many nodes, one device, one small network.

    data = study.digits()
    result = study.train(
        data,
        lambda exchange: jdaso.chain(optax.sgd(0.1), jdaso.dasgd(exchange, period=4, delay=1)),
        nodes=8, batch_size=16, epochs=24,
    )

Nodes are the positions of an axis of ``jax.vmap``, with the arithmetic of a real cluster, rounding
on the wire included. Not imported by ``import jdaso``.
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
from jax import lax

from jdaso._base import Exchange, PyTree
from jdaso._consensus import consensus
from jdaso._drain import drain
from jdaso._engine import Averaging
from jdaso._images import Images as Images
from jdaso._images import batches as batches
from jdaso._images import digits as digits
from jdaso._images import folder as folder
from jdaso._small_cnn import SmallCNN as SmallCNN
from jdaso._state import averaging_state
from jdaso._wire import wire_dtype, wire_shape
from jdaso.exchange._axis import axis_exchange

AXIS = "node"
TEST_BATCH = 500


class Result(NamedTuple):
    """What a training has shown.

    Attributes:
        losses: float32[steps], training loss, the mean over the nodes.
        bytes_sent: int64[steps], bytes that a node has sent up to each step.
        accuracy: of the evaluated parameters, on the test images.
        exchanges: how many there were; each fragment of the parameters counts.
        waits: at how many of them training waited, because the delay was 0.
    """

    losses: np.ndarray
    bytes_sent: np.ndarray
    accuracy: float
    exchanges: int
    waits: int


def train(
    data: Images,
    make_optimizer: Callable[[Exchange], optax.GradientTransformation],
    nodes: int,
    batch_size: int,
    epochs: int,
    seed: int = 0,
    evaluated: Callable[[PyTree, PyTree], PyTree] | None = None,
    model: SmallCNN | None = None,
) -> Result:
    """Trains one network on a virtual cluster.

    Args:
        data: the images; all nodes share them, see :func:`batches`.
        make_optimizer: ``exchange -> transformation``, a whole optimizer with one algorithm of
            jdaso in it. With :func:`jdaso.chain`, what is in flight at the end is merged.
        nodes: members of the cluster.
        batch_size: images of one node at one step.
        epochs: times that the images are gone through.
        seed: of the first parameters and of the batches.
        evaluated: ``(opt_state, params) -> params``, what of the first node is tested. None: the
            mean of the parameters over all nodes; for EASGD and EAMSGD it should be the centre.
        model: the network. None: the smallest :class:`SmallCNN` for these classes.

    Returns:
        A :class:`Result`.

    >>> import jdaso, optax
    >>> def make_optimizer(exchange):
    ...     return jdaso.chain(optax.sgd(0.05), jdaso.local_sgd(exchange, period=4))
    >>> result = train(digits(), make_optimizer, nodes=4, batch_size=32, epochs=1)
    >>> len(result.losses), result.exchanges, int(result.bytes_sent[-1])
    (11, 2, 73080)
    """
    order = batches(len(data.labels), nodes, batch_size, epochs, seed)
    exchange = counting(axis_exchange(AXIS, nodes))
    transformation = optax.with_extra_args_support(make_optimizer(exchange))
    model = model or SmallCNN(num_classes=int(data.labels.max()) + 1)
    first = model.init(jax.random.key(seed), jnp.asarray(data.images[:1]))

    def loss_fn(params, images, labels):
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(carry, batch):
        params, opt_state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = transformation.update(grads, opt_state, params, value=loss)
        state = averaging_state(opt_state)
        seen = loss, _bytes_sent(opt_state), state.exchanges, state.plan.delay == 0
        return (optax.apply_updates(params, updates), opt_state), seen

    def node(images, labels, order):
        (params, opt_state), seen = lax.scan(
            lambda carry, places: step(carry, (images[places], labels[places])),
            (first, transformation.init(first)),
            order,
        )
        if isinstance(transformation, Averaging):
            params, opt_state = drain(transformation, opt_state, params)
        if evaluated is None:
            return consensus(exchange, params), seen
        return evaluated(opt_state, params), seen

    cluster = jax.jit(jax.vmap(node, in_axes=(None, None, 1), axis_name=AXIS))
    params, seen = cluster(data.images, data.labels, order)
    losses, total, exchanges, at_once = jax.device_get(seen)
    posted = np.diff(exchanges[0], prepend=0)
    # The count goes round at 2^32, the differences of two steps do not.
    sent = np.diff(total[0], prepend=np.uint32(0)).astype(np.int64).cumsum()
    params = jax.tree.map(lambda x: x[0], params)
    return Result(
        losses=losses.mean(axis=0),
        bytes_sent=sent,
        accuracy=accuracy(model, params, data.test_images, data.test_labels),
        exchanges=int(posted.sum()),
        waits=int(posted[at_once[0]].sum()),
    )


def accuracy(model: SmallCNN, params: PyTree, images: np.ndarray, labels: np.ndarray) -> float:
    """The part of the images that the network puts into the right class.

    >>> import jax
    >>> data, model = digits(), SmallCNN()
    >>> params = model.init(jax.random.key(0), data.test_images)
    >>> accuracy(model, params, data.test_images, data.test_labels) < 0.5
    True
    """
    return float(_predicted_right(model, params, images, labels).mean())


@functools.partial(jax.jit, static_argnums=0)
def _predicted_right(model: SmallCNN, params: PyTree, images: jax.Array, labels: jax.Array):
    def right(image, label):
        return model.apply(params, image[None])[0].argmax() == label

    # A few at a time, for the memory.
    return lax.map(lambda one: right(*one), (images, labels), batch_size=TEST_BATCH)


class CountingState(NamedTuple):
    """State of the exchange that is counted, and the bytes a node has sent, modulo 2^32."""

    exchange: PyTree
    bytes_sent: jax.Array


def counting(exchange: Exchange) -> Exchange:
    """The exchange, whose state also counts the bytes that a node would send with MPI.

    Of n bytes as they cross, each of P nodes sends ``2 (P-1)/P n``; the header, a few
    numbers, is not counted.
    """

    def init(params):
        return CountingState(exchange.init(params), jnp.zeros((), jnp.uint32))

    def start(state, number, step, leaves, header, wire):
        size = sum(_wire_bytes(x, wire_dtype(x.dtype, wire)) for x in leaves)
        sent = 2 * (exchange.num_nodes - 1) * size // exchange.num_nodes
        inner, number = exchange.start(state.exchange, number, step, leaves, header, wire)
        return CountingState(inner, state.bytes_sent + jnp.uint32(sent)), number

    def finish(state, number, like):
        sums, header, inner = exchange.finish(state.exchange, number, like)
        return sums, header, state._replace(exchange=inner)

    return exchange._replace(init=init, start=start, finish=finish)


def _wire_bytes(leaf: jax.Array, dtype: np.dtype) -> int:
    return math.prod(wire_shape(leaf.shape, dtype)) * dtype.itemsize


def _bytes_sent(opt_state: PyTree) -> jax.Array:
    """Bytes that all fragments of the parameters have sent so far."""
    flights = averaging_state(opt_state).flights
    states = [flight.exchange for flight in flights if isinstance(flight.exchange, CountingState)]
    return sum([state.bytes_sent for state in states], jnp.zeros((), jnp.uint32))
