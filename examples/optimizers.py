"""The optimizers of the training scripts: SGD with momentum, and one way to talk between nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from config import SHARED, Config

import jdaso


class Optimizer(NamedTuple):
    """An optax transformation, and what goes with it.

    Attributes:
        transformation: the whole optimizer; its learning rate is 0 until
            :func:`with_learning_rate` sets it.
        exchange: what the nodes' parameters are averaged over before they are evaluated.
        evaluated: ``(params, opt_state) -> params``, this node's part of what is evaluated.
        averaging: what ``jdaso.drain`` takes; None if nothing is ever in flight.
    """

    transformation: optax.GradientTransformation
    exchange: jdaso.Exchange
    evaluated: Callable[[Any, Any], Any]
    averaging: optax.GradientTransformationExtraArgs | None


def create(config: Config, world: jdaso.Exchange, epoch_steps: int) -> Optimizer:
    """The optimizer that a configuration asks for.

    Args:
        config: as :func:`config.parse` returns it.
        world: how nodes reach each other.
        epoch_steps: optimizer steps of an epoch.
    """
    total, warmup = config.epochs * epoch_steps, config.warmup_epochs * epoch_steps
    decay = optax.add_decayed_weights(config.weight_decay, mask=kernels)

    def sgd(learning_rate):
        return optax.sgd(learning_rate, config.momentum or None, config.nesterov)

    local = optax.chain(decay, _injected(sgd))
    wire, flight = {"wire": config.wire}, {"wire": config.wire, "fragments": config.fragments}

    def mean(params, opt_state):
        return params

    def center(params, opt_state):  # without the sum in flight, which is a period old at most
        centers = jdaso.easgd_center(opt_state)
        return jax.tree.map(lambda x, c: c.astype(x.dtype), params, centers)

    if config.sync in SHARED:  # who optimizes is shared_model.py
        return Optimizer(optax.identity(), world, mean, None)
    if config.sync == "allreduce_gradients":
        first = jdaso.allreduce_gradients(world, **wire)
        return Optimizer(optax.chain(first, local), world, mean, None)
    if config.sync == "eamsgd":

        def elastic(learning_rate):
            return jdaso.eamsgd(world, config.period, learning_rate, config.momentum, **wire)

        # To drain takes no learning rate: any will do.
        return Optimizer(optax.chain(decay, _injected(elastic)), world, center, elastic(0.0))

    evaluated, moments = mean, config.moments or "local"
    if config.sync == "daso":
        schedule = jdaso.cycling(
            period=config.period,
            delay=config.delay,
            warmup=warmup,
            cooldown=config.cooldown_epochs * epoch_steps,
            total=total,
            epoch=epoch_steps,
        )
        averaging = jdaso.daso(world, schedule, **flight)
    elif config.sync == "dasgd":
        averaging = jdaso.dasgd(world, config.period, config.delay, config.own_weight, **flight)
    elif config.sync == "diloco":
        late = {"delay": config.delay, "mix": config.own_weight}
        averaging = jdaso.diloco(world, config.period, **late, **flight)
    elif config.sync == "easgd":
        averaging, evaluated = jdaso.easgd(world, config.period, **wire), center
    elif config.sync == "local_sgd":
        averaging = jdaso.local_sgd(world, config.period, **wire)
    elif config.sync == "post_local_sgd":  # a mean at every step while the learning rate rises
        schedule = jdaso.by_step(lambda step: (jnp.where(step < warmup, 1, config.period), 0))
        averaging = jdaso.local_sgd(world, schedule=schedule, **wire)
    else:
        world = jdaso.single_exchange()
        averaging = jdaso.local_sgd(world, total)
    averaging = jdaso.chain(local, averaging, moments)
    return Optimizer(averaging, world, evaluated, averaging)


def with_learning_rate(opt_state: Any, rate: jax.Array) -> Any:
    """The optimizer's state with the learning rate of the step that comes next.

    Args:
        opt_state: of an :class:`Optimizer`'s transformation.
        rate: float32, a scalar, traced inside the compiled step.
    """

    def is_number(path, value) -> bool:  # the state of eamsgd has another thing of that name
        return isinstance(value, jax.Array)

    return optax.tree.set(opt_state, is_number, learning_rate=rate)


def kernels(params: Any) -> Any:
    """Which parameters decay: those of convolutions and linear layers, by their dimensions.

    Norms' scales and biases do not (Goyal et al. 2017, Sec. 5.1).
    """
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def _injected(build: Callable) -> optax.GradientTransformation:
    """What a function of ``learning_rate`` builds, with the rate in its state."""
    return optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)(learning_rate=0.0)
