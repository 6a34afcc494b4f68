"""The learning rate: a linear warm-up to a peak that grows with the number of devices, and a decay.

The host computes the learning rate for every step and passes it to the compiled step as a number,
because it may depend on the losses of whole epochs, which only the host knows.
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
    """Three pure functions. Their state is the same on all nodes, and checkpoints must save it.

    Attributes:
        init: ``() -> state``, a tree of arrays. It is empty unless the decay depends on the loss.
        at: ``(state, epochs) -> learning rate``, where ``epochs`` is ``step / epoch_steps``.
        observe: ``(state, loss, epoch) -> state``, called at the end of every epoch with its
            number, counted from 0, and its training loss, averaged over all nodes.
    """

    init: Callable[[], Any]
    at: Callable[[Any, float], float]
    observe: Callable[[Any, float, int], Any]


def create(config: Config, num_devices: int) -> LearningRate:
    """Creates the learning rate of a configuration.

    With SGD the linear scaling rule gives the peak, ``config.learning_rate * num_devices``. With
    AdamW the peak is ``config.learning_rate``. The learning rate rises linearly from 0 to the peak
    during W warm-up epochs. After e of E epochs it is the peak multiplied by

        cosine:    f + (1 - f) (1 + cos(pi (e - W) / (E - W))) / 2 with f = decay_floor
        step:      decay_factor for each of decay_epochs that has begun
        plateau:   decay_factor for each time that the loss was stable for decay_patience epochs
        constant:  1

    A loss is stable if it is not below ``(1 - decay_threshold)`` times the best loss since the
    warm-up. A decay resets the count of stable epochs, but not the best loss.

    Args:
        config: The configuration from :func:`config.parse`.
        num_devices: Number of devices of all nodes.

    References:
        Goyal et al., Accurate, large minibatch SGD: training ImageNet in 1 hour, 2017, Sec. 2.1
        and 2.2, where the warm-up starts at the rate of one device. The plateau is that of
        daso-journal, Table 1.
    """
    peak, factor = config.learning_rate, config.decay_factor
    if config.optimizer == "sgd":
        peak *= num_devices
    warmup, total = config.warmup_epochs, config.epochs

    def cosine(state, epochs: float) -> float:
        wave = (1 + math.cos(math.pi * min((epochs - warmup) / (total - warmup), 1))) / 2
        return config.decay_floor + (1 - config.decay_floor) * wave

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
        return jax.device_get(test.init(jnp.float32(0)))  # the host uses it

    @jax.jit
    def tested(state, loss):
        return test.update((), state, value=loss)[1]

    def observe(state, loss: float, epoch: int):
        return state if epoch < warmup else jax.device_get(tested(state, loss))

    return LearningRate(init, at, observe)
