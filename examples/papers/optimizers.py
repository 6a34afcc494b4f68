"""The optimizers of the training scripts: SGD or AdamW, and one algorithm of jdaso."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from config import SHARED, Config

import jdaso


class Optimizer(NamedTuple):
    """An optimizer, and what a training needs besides.

    Attributes:
        transformation: ``learning rate -> transformation``. The state of the transformation does
            not contain the learning rate, which may be another one at each step.
        exchange: The exchange that averages the nodes' parameters before an evaluation.
        evaluated: ``(params, opt_state) -> params``, the parameters of this node that enter the
            evaluated mean.
        averaging: The argument of ``jdaso.drain``, or None if no exchange is ever in flight.
        before: A transformation of the gradients without a state.
    """

    transformation: Callable[[Any], optax.GradientTransformation]
    exchange: jdaso.Exchange
    evaluated: Callable[[Any, Any], Any]
    averaging: optax.GradientTransformationExtraArgs | None
    before: optax.GradientTransformation = optax.identity()

    def init(self, params: Any) -> Any:
        """The initial state."""
        return self.transformation(0.0).init(params)

    def apply_gradients(
        self, grads: Any, opt_state: Any, params: Any, rate: jax.Array, loss: jax.Array
    ) -> tuple[Any, Any]:
        """Takes a step with the learning rate ``rate``. Returns parameters and state."""
        grads, _ = self.before.update(grads, self.before.init(params), params)
        tx = self.transformation(rate)
        return jdaso.apply_gradients(tx, grads, opt_state, params, value=loss)


def create(
    config: Config, world: jdaso.Exchange, epoch_steps: int, cut: Callable[[int], Any] = int
) -> Optimizer:
    """Creates the optimizer of a configuration.

    Args:
        config: The configuration from :func:`config.parse`.
        world: The exchange between all nodes.
        epoch_steps: Optimizer steps of one epoch.
        cut: Makes the argument ``fragments`` of an algorithm from the number of fragments.
    """
    clip = optax.clip_by_global_norm(config.clip) if config.clip else optax.identity()
    decay = optax.chain(clip, optax.add_decayed_weights(config.weight_decay, mask=kernels))
    if config.sync in SHARED:  # shared_model.py has the optimizer
        return Optimizer(lambda rate: optax.identity(), world, _own_params, None)

    def eamsgd(rate: Any) -> optax.GradientTransformation:
        return jdaso.eamsgd(world, config.period, rate, config.momentum, wire=config.wire)

    # Draining does not use the learning rate, so any value will do.
    if config.sync == "eamsgd":  # a whole optimizer, which contains SGD
        return Optimizer(eamsgd, world, _center, eamsgd(0.0), before=decay)
    if config.sync == "none":
        world = jdaso.single_exchange()
    averaging = _averaging(config, world, epoch_steps, cut)

    def chained(rate: Any) -> optax.GradientTransformation:
        if config.optimizer == "adamw":
            betas = {"b1": config.beta1, "b2": config.beta2}
            adamw = optax.adamw(rate, **betas, weight_decay=config.weight_decay, mask=kernels)
            local = optax.chain(clip, adamw)
        else:
            local = optax.chain(decay, optax.sgd(rate, config.momentum or None, config.nesterov))
        return jdaso.chain(local, averaging, config.moments or "local")

    if config.sync == "allreduce_gradients":
        return Optimizer(chained, world, _own_params, None)
    evaluated = _center if config.sync == "easgd" else _own_params
    return Optimizer(chained, world, evaluated, chained(0.0))


def _averaging(
    config: Config, world: jdaso.Exchange, epoch_steps: int, cut: Callable[[int], Any]
) -> optax.GradientTransformationExtraArgs:
    """The algorithm of jdaso that is chained with the local optimizer."""
    total, warmup = config.epochs * epoch_steps, config.warmup_epochs * epoch_steps
    period, wire = config.period, config.wire
    fragments = None if config.fragments is None else cut(config.fragments)
    if config.sync == "allreduce_gradients":
        return jdaso.allreduce_gradients(world, wire=wire)
    if config.sync == "daso":
        schedule = jdaso.cycling(
            period=period,
            delay=config.delay,
            warmup=warmup,
            cooldown=config.cooldown_epochs * epoch_steps,
            total=total,
            epoch=epoch_steps,
        )
        return jdaso.daso(world, schedule=schedule, wire=wire, fragments=fragments)
    if config.sync == "dasgd":
        own = config.own_weight
        return jdaso.dasgd(world, period, config.delay, own, wire=wire, fragments=fragments)
    if config.sync in ("diloco", "streaming_diloco"):
        outer = optax.sgd(config.outer_rate, config.outer_momentum or None, nesterov=True)
        late = {"delay": config.delay, "mix": config.own_weight, "warmup": config.outer_warmup}
        return jdaso.diloco(world, period, outer, **late, wire=wire, fragments=fragments)
    if config.sync == "easgd":
        return jdaso.easgd(world, period, wire=wire)
    if config.sync == "local_sgd":
        return jdaso.local_sgd(world, period, wire=wire)
    if config.sync == "delta_rule":
        late = {"wire": wire, "fragments": fragments}
        return jdaso.local_sgd(world, period, config.delay, "delta", **late)
    if config.sync == "post_local_sgd":  # a mean at every step during warm-up
        schedule = jdaso.schedules.by_step(lambda step: (jnp.where(step < warmup, 1, period), 0))
        return jdaso.local_sgd(world, schedule=schedule, wire=wire)
    return jdaso.local_sgd(world, total)  # sync is "none", and the exchange has one node


def _own_params(params: Any, opt_state: Any) -> Any:
    return params


def _center(params: Any, opt_state: Any) -> Any:
    """The center without the sum that is in flight, which is at most one period old."""
    centers = jdaso.easgd_center(opt_state)
    return jax.tree.map(lambda x, c: c.astype(x.dtype), params, centers)


def kernels(params: Any) -> Any:
    """Marks the parameters that decay: those with more than one dimension.

    Scales of norms and biases do not decay (Goyal et al. 2017, Sec. 5.1).
    """
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)
