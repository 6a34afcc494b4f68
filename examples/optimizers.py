"""The optimizers of the training script: SGD with momentum, and one way to talk between nodes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jdaso

#: What --sync may be, and which options it listens to.
OPTIONS = {
    "daso": {"period", "delay", "fragments", "wire", "moments"},
    "dasgd": {"period", "delay", "own_weight", "fragments", "wire", "moments"},
    "local_sgd": {"period", "wire", "moments"},
    "post_local_sgd": {"period", "wire", "moments"},
    "easgd": {"period", "wire"},
    "eamsgd": {"period", "wire"},
    "diloco": {"period", "delay", "own_weight", "fragments", "wire", "moments"},
    "allreduce_gradients": {"wire"},
    "none": set(),
}
DEFAULTS = {"period": 4, "delay": 2, "fragments": 1, "wire": None, "moments": "local"}
WEIGHT_DECAY = 1e-4


class Optimizer(NamedTuple):
    """An optax transformation, and what goes with it.

    Attributes:
        transformation: the whole optimizer.
        exchange: what the nodes' parameters are averaged over before they are evaluated.
        evaluated: ``(params, opt_state) -> params``, this node's part of what is evaluated.
    """

    transformation: optax.GradientTransformation
    exchange: jdaso.Exchange
    evaluated: Callable[[Any, Any], Any]


def add_arguments(add: Callable) -> None:
    """Adds what concerns the exchange between nodes to a parser."""
    add("--sync", choices=OPTIONS, default="daso", help="between nodes")
    add("--period", type=int, help="steps between two exchanges (4)")
    add("--delay", type=int, help="steps that an exchange may fly (2); daso, dasgd, diloco")
    add("--own-weight", type=float, help="xi of dasgd (0.25), mix of diloco (0.5)")
    add("--fragments", type=int, help="exchanged in turn (1); daso, dasgd, diloco")
    add("--wire", help="dtype between nodes (the algorithm's own)")
    add("--moments", help="local, average or reset: what a merge does to momentum (local)")


def complete(args: argparse.Namespace) -> None:
    """Fills in defaults; refuses options that do not fit, or would have no effect."""
    if not 0 <= args.warmup_epochs < args.epochs:
        raise SystemExit(
            f"--warmup-epochs must be in [0, {args.epochs}), got {args.warmup_epochs}: there are "
            f"{args.epochs} epochs in all."
        )
    for name in ("own_weight", *DEFAULTS):
        if getattr(args, name) is None:
            setattr(args, name, DEFAULTS.get(name))
        elif name not in OPTIONS[args.sync]:
            option = name.replace("_", "-")
            raise SystemExit(f"--{option} has no effect with --sync {args.sync}; leave it out.")


def create(
    args: argparse.Namespace,
    world: jdaso.Exchange,
    epoch: int,
    learning_rate: optax.ScalarOrSchedule,
) -> Optimizer:
    """The optimizer that the arguments ask for; ``epoch`` is its number of steps."""
    total, warmup = args.epochs * epoch, args.warmup_epochs * epoch
    decay = optax.add_decayed_weights(WEIGHT_DECAY)
    local = optax.chain(decay, optax.sgd(learning_rate, args.momentum))
    xi = 0.25 if args.own_weight is None else args.own_weight
    mix = 0.5 if args.own_weight is None else args.own_weight
    wire, flight = {"wire": args.wire}, {"wire": args.wire, "fragments": args.fragments}

    def mean(params, opt_state):
        return params

    def center(params, opt_state):  # without the sum in flight, which is a period old at most
        centers = jdaso.easgd_center(opt_state)
        return jax.tree.map(lambda x, c: c.astype(x.dtype), params, centers)

    if args.sync == "allreduce_gradients":
        first = jdaso.allreduce_gradients(world, **wire)
        return Optimizer(optax.chain(first, local), world, mean)
    if args.sync == "eamsgd":
        elastic = jdaso.eamsgd(world, args.period, learning_rate, args.momentum, **wire)
        return Optimizer(optax.chain(decay, elastic), world, center)
    if args.sync == "none":
        nobody = jdaso.single_exchange()
        return Optimizer(optax.chain(local, jdaso.local_sgd(nobody, total)), nobody, mean)

    if args.sync == "daso":
        schedule = jdaso.cycling(
            period=args.period,
            delay=args.delay,
            warmup=warmup,
            cooldown=args.cooldown_epochs * epoch,
            total=total,
            epoch=epoch,
        )
        averaging = jdaso.daso(world, schedule, **flight)
    elif args.sync == "dasgd":
        averaging = jdaso.dasgd(world, args.period, args.delay, xi, **flight)
    elif args.sync == "diloco":
        averaging = jdaso.diloco(world, args.period, delay=args.delay, mix=mix, **flight)
    elif args.sync == "easgd":
        averaging = jdaso.easgd(world, args.period, **wire)
    elif args.sync == "local_sgd":
        averaging = jdaso.local_sgd(world, args.period, **wire)
    else:  # post-local SGD: a mean at every step while the learning rate rises
        schedule = jdaso.by_step(lambda step: (jnp.where(step < warmup, 1, args.period), 0))
        averaging = jdaso.local_sgd(world, schedule=schedule, **wire)
    evaluated = center if args.sync == "easgd" else mean
    return Optimizer(jdaso.chain(local, averaging, args.moments), world, evaluated)
