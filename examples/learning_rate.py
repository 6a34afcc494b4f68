"""The learning rate: linear warm-up to a peak that grows with the devices, then a decay.

It is computed on the host, once per step, and handed to the compiled step as a number: what it
depends on, the loss of whole epochs, is known there only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax.contrib
from config import Config


class LearningRate(NamedTuple):
    """Pure functions; the state is the same on all nodes, and belongs into a checkpoint.

    Attributes:
        init: ``() -> state``, a tree of arrays, empty unless the decay looks at the loss.
        at: ``(state, epochs) -> learning rate`` after so many epochs, ``step / epoch_steps``.
        observe: ``(state, loss, epoch) -> state``, once at the end of every epoch, whose number
            counts from 0, with its training loss, the mean over all nodes.
    """

    init: Callable[[], Any]
    at: Callable[[Any, float], float]
    observe: Callable[[Any, float, int], Any]


def create(config: Config, num_devices: int) -> LearningRate:
    """The learning rate that a configuration asks for.

    With the linear scaling rule the peak is ``config.learning_rate * num_devices``. It is reached
    from 0 in a straight line during warm-up and then multiplied, W warm-up epochs of E being over
    after e epochs, by

        cosine:    (1 + cos(pi (e - W) / (E - W))) / 2
        step:      decay_factor for each of decay_epochs that has begun
        plateau:   decay_factor for each time that the loss was stable for decay_patience epochs
        constant:  1

    A loss is stable as long as it is not below ``(1 - decay_threshold)`` of the best one since
    warm-up. After a decay the count starts anew, the best loss stays.

    Args:
        config: as :func:`config.parse` returns it.
        num_devices: of all nodes.

    References:
        Goyal et al., Accurate, large minibatch SGD: training ImageNet in 1 hour, 2017, Sec. 2.1
        and 2.2, which starts at the rate of one device; the plateau: daso-journal, Table 1.
    """
    peak, factor = config.learning_rate * num_devices, config.decay_factor
    warmup, total = config.warmup_epochs, config.epochs

    def cosine(state, epochs: float) -> float:
        return (1 + math.cos(math.pi * min((epochs - warmup) / (total - warmup), 1))) / 2

    def step(state, epochs: float) -> float:
        return factor ** sum(epochs >= begun for begun in config.decay_epochs)

    def plateau(state, epochs: float) -> float:
        return float(state.scale)

    def constant(state, epochs: float) -> float:
        return 1.0

    shapes = {"cosine": cosine, "step": step, "plateau": plateau, "constant": constant}
    shape = shapes[config.decay]

    def at(state, epochs: float) -> float:
        return peak * (epochs / warmup if epochs < warmup else shape(state, epochs))

    if config.decay != "plateau":
        return LearningRate(tuple, at, lambda state, loss, epoch: state)

    test = optax.contrib.reduce_on_plateau(
        factor, config.decay_patience, rtol=config.decay_threshold
    )

    def init():
        return jax.device_get(test.init(jnp.float32(0)))  # on the host, where it is looked at

    @jax.jit
    def tested(state, loss):
        return test.update((), state, value=loss)[1]

    def observe(state, loss: float, epoch: int):
        return state if epoch < warmup else jax.device_get(tested(state, loss))

    return LearningRate(init, at, observe)
