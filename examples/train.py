"""Trains a ResNet on several nodes, with DASO or one of its relatives.

    mpiexec -n 2 python examples/train.py --devices 2 --out runs/demo
    srun -K --ntasks-per-node=1 python examples/train.py --model resnet50 --data /data/imagenet

Gradients are averaged over the devices of a node at every step, parameters between nodes as
--sync says. Without an MPI launcher there is one node.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path

import data
import jax
import jax.numpy as jnp
import models
import optax
import optimizers
import plots
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import jdaso

FETCH_EVERY = 10  # steps; to fetch the loss of each would keep the devices waiting


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=("resnet20", "resnet50"), default="resnet20")
    add("--data", default="digits", help="digits, or a folder with train/ and val/ or test/")
    optimizers.add_arguments(add)
    add("--epochs", type=int, default=24)
    add("--batch-size", type=int, default=16, help="images per device and step")
    add("--learning-rate", type=float, default=0.1, help="the highest one, after warm-up")
    add("--momentum", type=float, default=0.9)
    add("--warmup-epochs", type=int, default=3, help="the learning rate rises, daso blocks")
    add("--cooldown-epochs", type=int, default=3, help="daso blocks again")
    add("--seed", type=int, default=0)
    add("--devices", type=int, default=0, help="virtual CPU devices per process; 0: what is there")
    add("--processes-per-node", type=int, default=None, help="default: found out")
    add("--out", type=Path, default=Path("runs/train"), help="for metrics.jsonl and plot.png")
    args = parser.parse_args()
    optimizers.complete(args)
    return args


def make_steps(graphdef, tx, topology: jdaso.Topology):
    """The compiled training step, and the one that counts right answers."""

    def loss_fn(params, stats, images, labels):
        model = nnx.merge(graphdef, params, stats, copy=True)  # it is about to change its stats
        logits = model(images, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, nnx.state(model, nnx.BatchStat)

    value_and_grad = jdaso.local_value_and_grad(
        loss_fn,
        topology.mesh,
        has_aux=True,
        in_specs=(P(), P("local"), P("local")),
        across=jdaso.process_mean(topology),
    )

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def train_step(params, stats, opt_state, images, labels):
        (loss, stats), grads = value_and_grad(params, stats, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), stats, opt_state, loss

    @jax.jit
    def num_correct(params, stats, images, labels):
        logits = nnx.merge(graphdef, params, stats)(images, train=False)
        return jnp.sum(logits.argmax(axis=-1) == labels)  # a label of -1 is never right

    return train_step, num_correct


def main() -> None:
    args = arguments()
    if args.devices:
        jdaso.use_virtual_devices(args.devices)
    topology = jdaso.discover_topology(args.processes_per_node)
    world = jdaso.mpi_exchange(topology)
    rank, num_ranks = topology.rank, len(topology.processes)
    replicated = NamedSharding(topology.mesh, P())
    sharded = NamedSharding(topology.mesh, P("local"))

    dataset = data.load(args.data, models.IMAGE_SIZE[args.model])
    batch_size = args.batch_size * topology.mesh.size
    images_per_step = batch_size * num_ranks
    epoch_steps = data.steps_per_epoch(len(dataset.train.labels), num_ranks, batch_size)

    model = models.create(args.model, dataset.channels, dataset.num_classes, args.seed)
    graphdef, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)
    params, stats = jdaso.broadcast(world, jax.device_put((params, stats), replicated))
    learning_rate = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, args.warmup_epochs * epoch_steps, args.epochs * epoch_steps
    )
    tx, exchange, evaluated = optimizers.create(args, world, epoch_steps, learning_rate)
    opt_state = jax.jit(tx.init, out_shardings=replicated)(params)
    train_step, num_correct = make_steps(graphdef, tx, topology)
    across = jdaso.process_mean(topology) or (lambda arrays: arrays)

    def evaluate(params, stats, loss):
        """Test accuracy and loss of all nodes; each process looks at its part of the images."""
        batches = data.test_batches(dataset.test, rank, num_ranks, batch_size)
        counts = [num_correct(params, stats, *jax.device_put(b, sharded)) for b in batches]
        means = jdaso.consensus(world, across([jnp.stack([sum(counts), loss])]))[0]
        return float(means[0]) * num_ranks / len(dataset.test.labels), float(means[1])

    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        metrics_file = (args.out / "metrics.jsonl").open("w", buffering=1)
    num_images = args.epochs * epoch_steps * images_per_step
    progress = tqdm(total=num_images, unit="img", unit_scale=True, disable=rank != 0)
    start = time.perf_counter()
    for epoch in range(args.epochs):
        epoch_start, losses = time.perf_counter(), []
        batches = data.train_batches(dataset.train, rank, num_ranks, batch_size, args.seed, epoch)
        for i, batch in enumerate(batches):
            images, labels = jax.device_put(batch, sharded)
            params, stats, opt_state, loss = train_step(params, stats, opt_state, images, labels)
            losses.append(loss)
            if i == 0:  # period and delay stay for the epoch, but for the blocking mean at its end
                plan = jax.device_get(jdaso.averaging_state(opt_state).plan)
            if i % FETCH_EVERY == 0 or i == epoch_steps - 1:
                progress.set_postfix_str(
                    f"epoch {epoch + 1}, loss {float(loss):.3f}, {jdaso.PHASES[plan.phase]}, "
                    f"period {plan.period}, delay {plan.delay}"
                )
                progress.update((epoch * epoch_steps + i + 1) * images_per_step - progress.n)
        seconds = time.perf_counter() - epoch_start
        # Batch statistics are each node's own in training, and so may parameters be: what is
        # evaluated is their mean.
        model_mean = jdaso.consensus(exchange, (evaluated(params, opt_state), stats))
        accuracy, loss = evaluate(*model_mean, jnp.mean(jnp.stack(losses)))
        metrics = {
            "step": (epoch + 1) * epoch_steps,
            "epoch": epoch + 1,
            "seconds": time.perf_counter() - start,
            "loss": loss,
            "test_accuracy": accuracy,
            "phase": jdaso.PHASES[plan.phase],
            "period": int(plan.period),
            "delay": int(plan.delay),
            "exchanges": int(jdaso.averaging_state(opt_state).exchanges),
            "images_per_second": epoch_steps * images_per_step / seconds,
        }
        if rank == 0:
            metrics_file.write(json.dumps(metrics) + "\n")
    progress.close()
    if rank == 0:
        plots.plot(args.out)
        report = world.report()
        print(
            f"test accuracy {accuracy:.4f}  (sync={args.sync}, {topology.num_nodes} nodes x "
            f"{topology.num_local_devices} devices, {metrics['seconds']:.1f} s, "
            f"{report['exchanges']} exchanges, {report['seconds_blocked']:.2f} s blocked, "
            f"{report['bytes_sent'] / 1e6:.0f} MB sent)"
        )


if __name__ == "__main__":
    main()
