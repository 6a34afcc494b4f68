"""The parts of a training, and the computations of all nodes between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import batches
import jax
import jax.numpy as jnp
import learning_rate
import numpy as np
import optimizers
from config import SHARED, Config
from flax import nnx
from image_folders import steps_per_epoch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from shared_model import SharedModel
from steps import Task, TrainState, make_steps

import jdaso


class Setup(NamedTuple):
    """The parts of a training that do not change.

    Attributes:
        config: The keys of the run.
        topology: The nodes, processes and devices of the job.
        world: The exchange between all nodes.
        task: The data set and the model.
        optimizer: The optimizer with its averaging.
        rates: The learning rate.
        batch_size: Images of this process in one step.
        images_per_step: Images of all processes in one step.
        epoch_steps: Steps of one epoch.
        train_step: The compiled training step, see :func:`steps.make_steps`.
        count: The compiled evaluation of a batch, see :func:`steps.make_steps`.
        across: Computes the mean over the processes of a node.
        settled: Returns the state with the parameters that all processes share. All processes must
            call it.
    """

    config: Config
    topology: jdaso.Topology
    world: jdaso.Exchange
    task: Task
    optimizer: optimizers.Optimizer
    rates: learning_rate.LearningRate
    batch_size: int
    images_per_step: int
    epoch_steps: int
    train_step: Callable
    count: Callable
    across: Callable
    settled: Callable[[TrainState], TrainState]

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.config.epochs * self.epoch_steps


def set_up(config: Config, topology: jdaso.Topology, task: Task) -> tuple[Setup, TrainState]:
    """Creates the parts of a training and its initial state, which is the same on all nodes."""
    world = jdaso.mpi_exchange(topology, on_failure=config.on_failure)
    num_processes, num_devices = len(topology.processes), len(topology.devices)
    batch_size = config.batch_size * num_devices
    epoch_steps = steps_per_epoch(task.dataset.train.size, num_processes, batch_size)
    optimizer = optimizers.create(config, world, epoch_steps)
    train_step, count = make_steps(task, optimizer, topology)
    shared, steps_together, settled = None, num_devices * num_processes, _as_it_is
    if config.sync in SHARED:
        shared, steps_together = SharedModel(config, task, topology, epoch_steps), 1
        train_step, settled = shared.train_step, shared.settled
    setup = Setup(
        config,
        topology,
        world,
        task,
        optimizer,
        learning_rate.create(config, steps_together),
        batch_size,
        batch_size * num_processes,
        epoch_steps,
        train_step,
        count,
        jdaso.exchange.process_mean(topology) or _as_it_is,
        settled,
    )
    check_sizes(setup)
    replicated = NamedSharding(topology.mesh, P())
    _, params, stats = nnx.split(task.model, nnx.Param, nnx.BatchStat)
    params, stats = jdaso.broadcast(world, jax.device_put((params, stats), replicated))
    opt_state = jax.jit(optimizer.init, out_shardings=replicated)(params)
    state = TrainState(params, stats, opt_state, no_losses(setup))
    if shared is not None:
        state = state._replace(opt_state=shared.init(state))
    return setup, state


def check_sizes(setup: Setup) -> None:
    """Raises ValueError if this process has another number of images than the first one."""
    own = [setup.task.dataset.train.size, setup.task.dataset.test.size]
    first = jdaso.broadcast(setup.world, np.array(own, np.int32)).tolist()
    if own != first:
        topology = setup.topology
        raise ValueError(
            f"data: {topology.describe(topology.rank)} has {own[0]} images for training and "
            f"{own[1]} for testing, but rank 0 has {first[0]} and {first[1]}; give all processes "
            "the same images."
        )


def no_losses(setup: Setup) -> jax.Array:
    """The sum and the number of losses at the beginning of an epoch, both 0."""
    return jax.device_put(jnp.zeros(2), NamedSharding(setup.topology.mesh, P()))


def training_batches(setup: Setup, begin: int) -> Iterator[Any]:
    """The batches of this process from step ``begin`` on, on its devices."""
    config, topology = setup.config, setup.topology
    feed = batches.train_batches(
        setup.task.dataset.train,
        topology.rank,
        len(topology.processes),
        setup.batch_size,
        config.epochs,
        config.seed,
        start=begin,
        workers=config.workers,
    )
    return (_on_devices(setup, batch) for batch in feed)


def evaluate(setup: Setup, params: Any, stats: Any) -> dict[str, float]:
    """Computes the scores on all test images, of which each process evaluates a part."""
    topology = setup.topology
    parts = batches.test_batches(
        setup.task.dataset.test,
        topology.rank,
        len(topology.processes),
        setup.batch_size,
    )  # loaded by threads, because starting worker processes would take longer
    counts = [setup.count(params, stats, *_on_devices(setup, batch)) for batch in parts]
    mine = np.sum(jax.device_get(counts), axis=0, dtype=np.float64)
    # The counts of joined processes are those of their node.
    programs = topology.num_nodes if topology.joined else len(topology.processes)
    return setup.task.score(mean_of(setup, mine) * programs)


def mean_of(setup: Setup, values: Any) -> np.ndarray:
    """The mean of a small float32 array over all processes, as float64."""
    mean = jdaso.consensus(setup.world, setup.across([jnp.asarray(values, jnp.float32)]))[0]
    return np.asarray(mean, np.float64)


def _as_it_is(tree: Any) -> Any:
    return tree


def _on_devices(setup: Setup, batch: Any) -> Any:
    """The images and labels of this process, on its devices."""
    split = NamedSharding(setup.topology.mesh, P("local"))
    return tuple(jax.make_array_from_process_local_data(split, x) for x in batch)
