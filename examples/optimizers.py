"""The optimizers of the training scripts: SGD with momentum and one algorithm of jdaso."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from config import SHARED, Config

import jdaso


class Optimizer(NamedTuple):
    """An optax transformation, and what a training needs besides.

    Attributes:
        transformation: The whole optimizer. Its learning rate is 0 until
            :func:`with_learning_rate` sets it.
        exchange: The exchange that averages the nodes' parameters before an evaluation.
        evaluated: ``(params, opt_state) -> params``, the parameters of this node that enter the
            evaluated mean.
        averaging: The argument of ``jdaso.drain``, or None if no exchange is ever in flight.
    """

    transformation: optax.GradientTransformation
    exchange: jdaso.Exchange
    evaluated: Callable[[Any, Any], Any]
    averaging: optax.GradientTransformationExtraArgs | None


def create(config: Config, world: jdaso.Exchange, epoch_steps: int) -> Optimizer:
    """Creates the optimizer of a configuration.

    Args:
        config: The configuration from :func:`config.parse`.
        world: The exchange between all nodes.
        epoch_steps: Optimizer steps of one epoch.
    """
    decay = optax.add_decayed_weights(config.weight_decay, mask=kernels)
    if config.sync in SHARED:  # shared_model.py has the optimizer
        return Optimizer(optax.identity(), world, _own_params, None)
    if config.sync == "eamsgd":  # a whole optimizer, which contains SGD
        # Draining does not use the learning rate, so any value will do.
        transformation = optax.chain(decay, _injected(functools.partial(_eamsgd, config, world)))
        return Optimizer(transformation, world, _center, _eamsgd(config, world, 0.0))

    local = optax.chain(decay, _injected(functools.partial(_sgd, config)))
    if config.sync == "allreduce_gradients":
        first = jdaso.allreduce_gradients(world, wire=config.wire)
        return Optimizer(optax.chain(first, local), world, _own_params, None)
    if config.sync == "none":
        world = jdaso.single_exchange()
    averaging = jdaso.chain(
        local, _averaging(config, world, epoch_steps), config.moments or "local"
    )
    evaluated = _center if config.sync == "easgd" else _own_params
    return Optimizer(averaging, world, evaluated, averaging)


def _averaging(
    config: Config, world: jdaso.Exchange, epoch_steps: int
) -> optax.GradientTransformationExtraArgs:
    """The algorithm of jdaso that comes after the local optimizer."""
    total, warmup = config.epochs * epoch_steps, config.warmup_epochs * epoch_steps
    period, wire, fragments = config.period, config.wire, config.fragments
    if config.sync == "daso":
        schedule = jdaso.cycling(
            period=period,
            delay=config.delay,
            warmup=warmup,
            cooldown=config.cooldown_epochs * epoch_steps,
            total=total,
            epoch=epoch_steps,
        )
        return jdaso.daso(world, schedule, wire=wire, fragments=fragments)
    if config.sync == "dasgd":
        own = config.own_weight
        return jdaso.dasgd(world, period, config.delay, own, wire=wire, fragments=fragments)
    if config.sync == "diloco":
        late = {"delay": config.delay, "mix": config.own_weight}
        return jdaso.diloco(world, period, **late, wire=wire, fragments=fragments)
    if config.sync == "easgd":
        return jdaso.easgd(world, period, wire=wire)
    if config.sync == "local_sgd":
        return jdaso.local_sgd(world, period, wire=wire)
    if config.sync == "post_local_sgd":  # a mean at every step during warm-up
        schedule = jdaso.schedules.by_step(lambda step: (jnp.where(step < warmup, 1, period), 0))
        return jdaso.local_sgd(world, schedule=schedule, wire=wire)
    return jdaso.local_sgd(world, total)  # sync is "none", and the exchange has one node


def _sgd(config: Config, learning_rate: Any) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, config.momentum or None, config.nesterov)


def _eamsgd(config: Config, world: jdaso.Exchange, learning_rate: Any):
    return jdaso.eamsgd(world, config.period, learning_rate, config.momentum, wire=config.wire)


def _own_params(params: Any, opt_state: Any) -> Any:
    return params


def _center(params: Any, opt_state: Any) -> Any:
    """The centre without the sum that is in flight, which is at most one period old."""
    centers = jdaso.easgd_center(opt_state)
    return jax.tree.map(lambda x, c: c.astype(x.dtype), params, centers)


def with_learning_rate(opt_state: Any, rate: jax.Array) -> Any:
    """Returns the optimizer's state with the learning rate of the next step.

    Args:
        opt_state: State of an :class:`Optimizer`'s transformation.
        rate: A float32 scalar, traced inside the compiled step.
    """

    def is_number(path, value) -> bool:  # eamsgd's state has another field of that name
        return isinstance(value, jax.Array)

    return optax.tree.set(opt_state, is_number, learning_rate=rate)


def kernels(params: Any) -> Any:
    """Marks the parameters that decay: those with more than one dimension.

    Scales of norms and biases do not decay (Goyal et al. 2017, Sec. 5.1).
    """
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


def _injected(build: Callable) -> optax.GradientTransformation:
    """Builds a transformation whose state holds its learning rate."""
    return optax.inject_hyperparams(build, hyperparam_dtype=jnp.float32)(learning_rate=0.0)
