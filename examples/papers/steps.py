"""The compiled functions: one training step, and the evaluation of one batch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optimizers
from data import Dataset
from flax import nnx
from jax.sharding import PartitionSpec as P
from placement import Placement

import jdaso


class Task(NamedTuple):
    """A data set, a model, and how the model is trained and scored.

    Attributes:
        dataset: Images and labels.
        model: The model with its initial parameters. ``model(images, train)`` returns outputs.
        loss: ``(outputs, labels) -> float32 scalar``, the mean over the batch of a device.
        counts: ``(outputs, labels) -> float32 array``, which is summed over all test images. Labels
            of -1 must not count.
        score: ``counts -> {"test_...": value}``, the scores for the summed counts.
        tokens: Tokens of an input, which then is a sequence, not an image. Speeds count tokens.
        cut: Makes the argument ``fragments`` of an algorithm from the number of fragments.
    """

    dataset: Dataset
    model: nnx.Module
    loss: Callable[[Any, jax.Array], jax.Array]
    counts: Callable[[Any, jax.Array], jax.Array]
    score: Callable[[np.ndarray], dict[str, float]]
    tokens: int = 0
    cut: Callable[[int], Any] = int


class TrainState(NamedTuple):
    """The state that a training step updates.

    Attributes:
        params: The parameters of the model.
        stats: The batch statistics of the model.
        opt_state: The state of the optimizer.
        losses: float32[2], the sum and the number of this node's losses in the current epoch.
    """

    params: Any
    stats: Any
    opt_state: Any
    losses: jax.Array


def make_steps(
    task: Task,
    optimizer: optimizers.Optimizer,
    topology: jdaso.Topology,
    accumulate: int = 1,
    place: Placement | None = None,
) -> tuple[Callable, Callable]:
    """Compiles the training step and the evaluation.

    Args:
        task: The data set and the model.
        optimizer: The optimizer with its averaging.
        topology: The nodes, processes and devices of the job.
        accumulate: Number of micro-batches, the first axis of images and labels, if above 1.
        place: How the state is spread over the devices of a node. None: each device has all of it.

    Returns:
        ``train_step(state, rate, images, labels) -> (state, loss, metrics)`` and
        ``count(params, stats, images, labels) -> counts``.
    """
    graphdef = nnx.graphdef(task.model)
    if place is None:
        value_and_grad = jdaso.local_value_and_grad(
            loss_of(task),
            topology.mesh,
            has_aux=True,
            in_specs=(P(), P("local"), P("local")),
        )
    else:  # jit averages over the batch, and gathers parameters where they are used
        value_and_grad = jax.value_and_grad(loss_of(task), has_aux=True)
    if accumulate > 1:
        value_and_grad = accumulated(value_and_grad, accumulate)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, rate, images, labels):
        params, stats, opt_state, losses = state
        (loss, stats), grads = value_and_grad(params, stats, images, labels)
        params, opt_state = optimizer.apply_gradients(grads, opt_state, params, rate, loss)
        losses += jnp.stack([loss, jnp.ones_like(loss)])
        state = TrainState(params, stats, opt_state, losses)
        if place is not None:
            state = jax.lax.with_sharding_constraint(state, jax.tree.map(place, state))
        return state, loss, jdaso.metrics(opt_state)

    @jax.jit
    def count(params, stats, images, labels):
        return task.counts(nnx.merge(graphdef, params, stats)(images, train=False), labels)

    return train_step, count


def accumulated(value_and_grad: Callable, count: int) -> Callable:
    """Averages loss and gradients over micro-batches, one after the other."""

    def over_all(params, stats, images, labels):
        def add(total, batch):
            stats, loss, grads = total
            (more, stats), each = value_and_grad(params, stats, *batch)
            return (stats, loss + more, jax.tree.map(jnp.add, grads, each)), None

        zero = (stats, jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (stats, loss, grads), _ = jax.lax.scan(add, zero, (images, labels))
        return (loss / count, stats), jax.tree.map(lambda x: x / count, grads)

    return over_all


def loss_of(task: Task) -> Callable:
    """The loss function ``(params, stats, images, labels) -> (loss, stats)`` of a task."""
    graphdef = nnx.graphdef(task.model)

    def loss_fn(params, stats, images, labels):
        model = nnx.merge(graphdef, params, stats, copy=True)  # a copy, whose statistics change
        loss = task.loss(model(images, train=True), labels)
        updated = nnx.state(model, nnx.BatchStat)
        # A batch that is not finite would stay in the running statistics forever.
        keep_finite = lambda old, new: jnp.where(jnp.isfinite(new), new, old)  # noqa: E731
        stats = jax.tree.map(keep_finite, stats, updated)
        return loss, stats

    return loss_fn
