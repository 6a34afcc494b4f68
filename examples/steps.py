"""What is compiled: one training step, and the counts of one batch of an evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optimizers
from data import Dataset
from flax import nnx
from jax.sharding import PartitionSpec as P

import jdaso


class Task(NamedTuple):
    """What is learnt from what.

    Attributes:
        dataset: images and labels.
        model: with its first parameters; ``model(images, train)`` gives outputs.
        loss: ``(outputs, labels) -> float32 scalar``, the mean over a device's batch.
        counts: ``(outputs, labels) -> float32 array``, summed over all test images; a label of
            -1 counts nothing.
        score: ``(counts) -> {"test_...": value}``.
    """

    dataset: Dataset
    model: nnx.Module
    loss: Callable[[Any, jax.Array], jax.Array]
    counts: Callable[[Any, jax.Array], jax.Array]
    score: Callable[[np.ndarray], dict[str, float]]


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        params: the model's parameters.
        stats: its batch statistics.
        opt_state: of the optimizer.
        losses: float32[2], sum and number of this node's losses in this epoch.
    """

    params: Any
    stats: Any
    opt_state: Any
    losses: jax.Array


def make_steps(
    task: Task, optimizer: optimizers.Optimizer, topology: jdaso.Topology
) -> tuple[Callable, Callable]:
    """``train_step(state, rate, images, labels) -> (state, loss, metrics)``, and
    ``count(params, stats, images, labels) -> counts``."""
    graphdef = nnx.graphdef(task.model)
    value_and_grad = jdaso.local_value_and_grad(
        loss_of(task),
        topology.mesh,
        has_aux=True,
        in_specs=(P(), P("local"), P("local")),
        across=jdaso.process_mean(topology),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: TrainState, rate, images, labels):
        params, stats, opt_state, losses = state
        opt_state = optimizers.with_learning_rate(opt_state, rate)
        (loss, stats), grads = value_and_grad(params, stats, images, labels)
        updates, opt_state = optimizer.transformation.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        losses += jnp.stack([loss, jnp.ones_like(loss)])
        return TrainState(params, stats, opt_state, losses), loss, jdaso.metrics(opt_state)

    @jax.jit
    def count(params, stats, images, labels):
        return task.counts(nnx.merge(graphdef, params, stats)(images, train=False), labels)

    return train_step, count


def loss_of(task: Task) -> Callable:
    """``(params, stats, images, labels) -> (loss, stats)`` of a task's model in training."""
    graphdef = nnx.graphdef(task.model)

    def loss_fn(params, stats, images, labels):
        model = nnx.merge(graphdef, params, stats, copy=True)  # it is about to change its stats
        loss, seen = task.loss(model(images, train=True), labels), nnx.state(model, nnx.BatchStat)
        # A batch that is not finite would otherwise stay in the running statistics for ever.
        stats = jax.tree.map(lambda old, new: jnp.where(jnp.isfinite(new), new, old), stats, seen)
        return loss, stats

    return loss_fn
