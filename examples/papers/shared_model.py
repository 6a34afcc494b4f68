"""Uses assm, passm and passm_plus, with one model in shared memory, in the training loop.

Processes are at most four steps apart, because all of them exchange whether a signal has arrived.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from config import Config
from optimizers import kernels
from steps import Task, TrainState, loss_of

import jdaso
from jdaso import passm

CYCLING = jdaso.schedules.PHASES.index("cycling")


class SharedModel:
    """A model in shared memory that all processes train.

    The first training step moves the model to shared memory. Until then a checkpoint may replace
    the parameters.

    Args:
        config: The configuration from :func:`config.parse`.
        task: The data set and the model.
        topology: The processes, all on one host, with one device each.
        epoch_steps: Steps of one process in an epoch.

    Raises:
        ValueError: If the number of processes or devices does not fit.
    """

    def __init__(self, config: Config, task: Task, topology: jdaso.Topology, epoch_steps: int):
        count = len(topology.processes)
        if config.processes not in (None, count):
            raise ValueError(
                f"processes: {config.processes} were requested, but the launcher started {count}; "
                "leave the option out, or start without a launcher."
            )
        if topology.mesh.size > 1:
            raise ValueError(
                f"devices: --sync {config.sync} trains with one device per process, got "
                f"{topology.mesh.size}; start one process for each (CUDA_VISIBLE_DEVICES)."
            )
        self._config, self._topology, self._epoch_steps = config, topology, epoch_steps
        self._task = task
        self._loss_fn = _on_one_device(loss_of(task))
        self._memory: passm.Memory | None = None
        self._training: passm.Training | None = None
        self._blocks: list[passm.Block] = []
        self._rate = 0.0

    def init(self, state: TrainState) -> passm.State:
        """The private state of this process."""
        count = len(self._topology.processes)
        batch = [np.expand_dims(x, 0) for x in self._task.dataset.train.load(0, None)]
        order = passm.order_of_use(self._loss_fn, state.params, state.stats, *batch)
        self._blocks = passm.partition(state.params, count, order)
        alone = passm.simulated_memory(state.params, count)[self._topology.rank]
        return self._method(alone).init()

    def train_step(self, state: TrainState, rate: Any, images: jax.Array, labels: jax.Array):
        """Takes a step like that of steps.py. The returned state keeps its parameters."""
        data = state.stats, images, labels
        if self._training is None:
            self._memory = passm.shared_memory(self._topology, state.params)
            self._training = self._method(self._memory)
            self._training.init(*data)  # compiles, so that all processes begin together
        # Algorithm 1 multiplies by 1 - m. Dividing gives the option the same meaning as for SGD.
        self._rate = float(rate) / (1 - self._config.momentum)
        own, (loss, stats) = self._training.step(state.opt_state, *data)
        losses = state.losses + jnp.stack([loss, jnp.ones_like(loss)])
        metrics = jdaso.core.Metrics(own.step, CYCLING, 1, 0, 0, 0, False, own.skipped, 0)
        return TrainState(state.params, stats, own, losses), loss, metrics

    def settled(self, state: TrainState) -> TrainState:
        """Returns the state with the shared parameters. All processes must call it."""
        if self._memory is None:
            return state
        params = jax.device_put(
            passm.settled(self._memory), jax.tree.leaves(state.params)[0].sharding
        )
        return state._replace(params=params)

    def _method(self, memory: passm.Memory) -> passm.Training:
        config = self._config
        options = {
            "momentum": config.momentum,
            "before": optax.add_decayed_weights(config.weight_decay, mask=kernels),
            "has_aux": True,
        }
        if config.sync == "passm_plus":
            options["switches"] = switches(config, self._epoch_steps)
        method = getattr(passm, config.sync)
        return method(memory, self._blocks, self._loss_fn, lambda step: self._rate, **options)


def switches(config: Config, epoch_steps: int) -> list[int]:
    """The steps at which PASSM+ switches, from the configuration or from the paper's heuristic."""
    if config.switches:
        return [epoch * epoch_steps for epoch in config.switches]
    drops = [epoch * epoch_steps for epoch in config.decay_epochs]
    return passm.switches_around(drops, config.epochs * epoch_steps)


def _on_one_device(loss_fn):
    """Binds the axis of local devices, over which BatchNorm averages, with size 1."""
    return jax.vmap(loss_fn, in_axes=None, out_axes=None, axis_size=1, axis_name="local")
