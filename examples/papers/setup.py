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
from placement import replicated, sharded
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
        batch_size: Images or sequences of this process in one step.
        items_per_step: Images or sequences of all processes in one step.
        epoch_steps: Steps of one epoch.
        train_step: The compiled training step, see :func:`steps.make_steps`.
        count: The compiled evaluation of a batch, see :func:`steps.make_steps`.
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
    items_per_step: int
    epoch_steps: int
    train_step: Callable
    count: Callable
    settled: Callable[[TrainState], TrainState]

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.config.epochs * self.epoch_steps


def set_up(config: Config, topology: jdaso.Topology, task: Task) -> tuple[Setup, TrainState]:
    """Creates the parts of a training and its initial state, which is the same on all nodes."""
    place = sharded(topology) if config.shard else replicated(topology)
    world = jdaso.mpi_exchange(
        topology,
        shardings=(lambda path, x: place(x)) if config.shard else None,
    )
    num_processes, num_devices = len(topology.processes), len(topology.devices)
    batch_size = config.batch_size * num_devices
    epoch_steps = steps_per_epoch(task.dataset.train.size, num_processes, batch_size)
    optimizer = optimizers.create(config, world, epoch_steps, task.cut)
    train_step, count = make_steps(
        task, optimizer, topology, config.accumulate, place if config.shard else None
    )
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
        settled,
    )
    check_sizes(setup)
    _, params, stats = nnx.split(task.model, nnx.Param, nnx.BatchStat)
    if config.shard and jax.tree.leaves(stats):
        raise ValueError(
            "shard: BatchNorm averages over the devices of a node, which needs a copy of the "
            "parameters on each; leave --shard out, or use a model without BatchNorm."
        )
    params, stats = jax.device_put((params, stats), jax.tree.map(place, (params, stats)))
    params, stats = jdaso.broadcast(world, (params, stats))
    shardings = jax.tree.map(place, jax.eval_shape(optimizer.init, params))
    opt_state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    state = TrainState(params, stats, opt_state, no_losses(setup))
    if shared is not None:
        state = state._replace(opt_state=shared.init(state))
    return setup, state


def check_sizes(setup: Setup) -> None:
    """Raises ValueError if this process has another number of images than the first one."""
    dataset = setup.task.dataset
    own = [dataset.train.size, dataset.test.size, dataset.fingerprint]
    first = jdaso.broadcast(setup.world, np.array(own, np.int32)).tolist()
    if own != first:
        topology = setup.topology
        items = "sequences" if setup.task.tokens else "images"
        mine, theirs = (f"{x[0]} {items} for training, {x[1]} for testing" for x in (own, first))
        raise ValueError(
            f"data: {topology.describe(topology.rank)} has {mine} (fingerprint {own[2]}), but rank "
            f"0 has {theirs} (fingerprint {first[2]}); give all processes the same {items}."
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
    return (_on_devices(setup, batch, config.accumulate) for batch in feed)


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
    return setup.task.score(mean_of(setup, mine) * topology.num_nodes)


def mean_of(setup: Setup, values: Any) -> np.ndarray:
    """The mean of a small float32 array over all nodes, as float64."""
    mean = jdaso.consensus(setup.world, jnp.asarray(values, jnp.float32))
    return np.asarray(mean, np.float64)


def _as_it_is(tree: Any) -> Any:
    return tree


def _on_devices(setup: Setup, batch: Any, micro_batches: int = 1) -> Any:
    """The images and labels of this process, on its devices, with an axis of micro-batches."""
    mesh, cut = setup.topology.mesh, micro_batches > 1
    split = NamedSharding(mesh, P(None, "local") if cut else P("local"))
    if cut:
        batch = [x.reshape(micro_batches, -1, *x.shape[1:]) for x in batch]
    return tuple(jax.make_array_from_process_local_data(split, x) for x in batch)
