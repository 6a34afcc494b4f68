"""Trains ResNet-50 on ImageNet with DASO: nodes average parameters every fourth step, with a delay.

    srun -K python examples/resnet50.py --data /data/imagenet --out runs/imagenet
    mpiexec -n 2 python examples/resnet50.py --model resnet20 --data digits --devices 2 \\
        --batch-size 16 --learning-rate 0.025 --epochs 12 --warmup-epochs 2 --cooldown-epochs 2

Each process is a node with all its devices, over which gradients and BatchNorm are averaged at
every step. In the first and the last epochs (warm-up and cool-down) the nodes average parameters at
every step as well, and wait for it. In between, the schedule adapts period and delay to the loss.
A training continues from the last checkpoint in --out. examples/papers has the papers' settings.
"""

import argparse
import functools
import sys

import images
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import StandardCheckpointer
from record import Record

import jdaso
from jdaso.core.command_line import path_option

# Blocks of each stage, width of the first one, whether a block is a bottleneck of three
# convolutions, and the height and width of the images.
MODELS = {
    "resnet50": ((3, 4, 6, 3), 64, True, 224),
    "resnet20": ((3, 3, 3), 16, False, 32),
    "resnet8": ((1, 1, 1), 16, False, 32),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="resnet50", help="resnet50 is for large images")
    add("--data", type=path_option, default="synthetic", help="digits, synthetic, or a folder "
        "with train/<class>/* and val/<class>/*")  # fmt: skip
    add("--out", type=path_option, default="runs/resnet50", help="folder of metrics and model")
    add("--epochs", type=int, default=90, help="passes over the data")
    add("--warmup-epochs", type=int, default=5, help="the learning rate rises, and DASO blocks")
    add("--cooldown-epochs", type=int, default=4, help="DASO blocks")
    add("--period", type=int, default=4, help="steps between two exchanges")
    add("--delay", type=int, default=1, help="steps after which an exchange is merged")
    add("--batch-size", type=int, default=256, help="images per device and step")
    add("--learning-rate", type=float, default=0.0125, help="peak for each device of all nodes")
    add("--bfloat16", action="store_true", help="compute activations in bfloat16")
    add("--devices", type=int, help="virtual CPU devices per process, in place of the real ones")
    add("--seed", type=int, default=0, help="of parameters, order and crops")
    return parser.parse_args()


class ConvNorm(nnx.Module):
    """A convolution, and a BatchNorm over the batch of all devices of the node."""

    def __init__(self, inputs, outputs, kernel, stride, dtype, rngs, scale=1.0):
        he = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        shape = {"kernel_size": (kernel, kernel), "strides": stride, "use_bias": False}
        self.conv = nnx.Conv(inputs, outputs, **shape, kernel_init=he, dtype=dtype, rngs=rngs)
        constant = nnx.initializers.constant(scale)
        norm = {"momentum": 0.9, "axis_name": "local", "scale_init": constant}
        self.norm = nnx.BatchNorm(outputs, **norm, dtype=dtype, rngs=rngs)

    def __call__(self, x, train):
        return self.norm(self.conv(x), use_running_average=not train)


class Block(nnx.Module):
    """Two or three convolutions with a shortcut around them. It starts as the identity."""

    def __init__(self, inputs, width, stride, bottleneck, dtype, rngs):
        if bottleneck:
            convs = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        else:
            convs = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.outputs, scales = convs[-1][1], [1.0] * (len(convs) - 1) + [0.0]
        self.convs = nnx.List(
            ConvNorm(*conv, dtype, rngs, scale) for conv, scale in zip(convs, scales, strict=True)
        )
        self.widens = inputs != self.outputs
        if self.widens:
            self.shortcut = ConvNorm(inputs, self.outputs, 1, stride, dtype, rngs)

    def __call__(self, x, train):
        y = x
        for conv in self.convs[:-1]:
            y = nnx.relu(conv(y, train))
        x = self.shortcut(x, train) if self.widens else x
        return nnx.relu(x + self.convs[-1](y, train))


class ResNet(nnx.Module):
    """He et al. 2016, Deep residual learning for image recognition."""

    def __init__(self, name, channels, num_classes, dtype, rngs):
        stages, width, bottleneck, self.pixels = MODELS[name]
        kernel, stride = (7, 2) if self.pixels == 224 else (3, 1)
        self.stem = ConvNorm(channels, width, kernel, stride, dtype, rngs)
        self.dtype, blocks, features = dtype, [], width
        for stage, depth in enumerate(stages):
            for i in range(depth):
                stride = 2 if stage and not i else 1
                blocks.append(Block(features, width * 2**stage, stride, bottleneck, dtype, rngs))
                features = blocks[-1].outputs
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, num_classes, rngs=rngs)

    def __call__(self, pixels, train):
        x = (pixels.astype(jnp.float32) / 127.5 - 1).astype(self.dtype)
        x = nnx.relu(self.stem(x, train))
        if self.pixels == 224:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x, train)
        return self.head(x.astype(jnp.float32).mean(axis=(1, 2)))


def main() -> int:
    args = options()
    if args.devices:
        jdaso.cluster.use_virtual_devices(args.devices)
    topology = jdaso.discover_topology(processes_per_node=1)
    exchange = jdaso.mpi_exchange(topology)
    node, nodes, devices = topology.node, topology.num_nodes, topology.num_local_devices

    # Data: each node has its own share in every epoch. All take the same number of steps.
    train, test, num_classes, channels = images.load(args.data, MODELS[args.model][-1])
    batch_size = args.batch_size * devices  # of a node
    epoch = train.size // (batch_size * nodes)  # in steps
    if not epoch:
        raise SystemExit(f"{train.size} images are no batch of {batch_size} on {nodes} nodes.")
    total, warmup = args.epochs * epoch, args.warmup_epochs * epoch

    # Model and optimizer, which start with the same numbers on all nodes.
    dtype = jnp.bfloat16 if args.bfloat16 else jnp.float32
    rngs = nnx.Rngs(jax.random.key(args.seed, impl="rbg"))  # compiles faster than the default
    graphdef, params, stats = nnx.split(
        ResNet(args.model, channels, num_classes, dtype, rngs), nnx.Param, nnx.BatchStat
    )
    peak = args.learning_rate * devices * nodes
    rate = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total)
    schedule = jdaso.cycling(
        period=args.period,
        delay=args.delay,
        warmup=warmup,
        cooldown=args.cooldown_epochs * epoch,
        total=total,
        epoch=epoch,
    )
    kernels = functools.partial(jax.tree.map, lambda x: x.ndim > 1)  # not of norms and biases
    sgd = optax.chain(optax.add_decayed_weights(1e-4, kernels), optax.sgd(rate, momentum=0.9))
    tx = jdaso.chain(sgd, jdaso.daso(exchange, schedule=schedule))
    everywhere, split = (NamedSharding(topology.mesh, spec) for spec in (P(), P("local")))
    params, stats = jax.device_put((params, stats), everywhere)
    params, stats = jdaso.broadcast(exchange, (params, stats))
    opt_state = jax.jit(tx.init, out_shardings=everywhere)(params)

    def loss_fn(params, stats, pixels, labels):
        model = nnx.merge(graphdef, params, stats, copy=True)
        logits = model(pixels, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        new = nnx.state(model, nnx.BatchStat)  # one bad batch must not stay in them forever
        new = jax.tree.map(lambda x, old: jnp.where(jnp.isfinite(x), x, old), new, stats)
        return loss, new

    specs = (P(), P("local"), P("local"))  # BatchNorm's statistics are the same on all devices
    value_and_grad = jdaso.local_value_and_grad(
        loss_fn, topology.mesh, has_aux=True, in_specs=specs
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, pixels, labels):
        params, stats, opt_state = state
        (loss, stats), grads = value_and_grad(params, stats, pixels, labels)
        params, opt_state = jdaso.apply_gradients(tx, grads, opt_state, params, value=loss)
        return (params, stats, opt_state), loss, jdaso.metrics(opt_state)

    @jax.jit
    def count(params, stats, pixels, labels):
        logits = nnx.merge(graphdef, params, stats)(pixels, train=False)
        return jnp.float32([(logits.argmax(-1) == labels).sum(), (labels >= 0).sum()])

    def evaluate(params, stats):
        batches = images.test_batches(test, node, nodes, batch_size)
        counts = [count(params, stats, *jax.device_put(batch, split)) for batch in batches]
        right, number = jdaso.consensus(exchange, sum(counts))  # the mean over the nodes
        return right / number

    # Checkpoints hold the state of each node and what is in flight between them.
    checkpoints = jdaso.checkpoint.Checkpoints(args.out / "checkpoints", topology, exchange)
    checkpoints.claim()
    state, step, saved = (params, stats, opt_state), 0, 0
    if restored := checkpoints.restore((state, epoch)):
        (state, its_epoch), step, saved = restored.state, restored.step, restored.step
        if its_epoch != epoch:  # another number of nodes or devices, and so of steps
            step = step * epoch // its_epoch
            state = optax.tree.set(jdaso.checkpoint.at_step(state, step), count=jnp.int32(step))
        if node == 0:
            print(f"continues at step {step} of {total}")
    record = Record(args.out, topology, exchange, step, batch_size * nodes, "images", saved)
    losses, stop = [], False
    batches = images.batches(train, node, nodes, batch_size, args.epochs, args.seed, step)
    numbered = enumerate(batches, step + 1)
    with jdaso.cluster.Preemption() as preemption:  # SIGTERM, SIGUSR1
        for step, batch in numbered:
            state, loss, metrics = train_step(state, *jax.device_put(batch, split))
            losses.append(loss)
            if len(losses) == 1:
                plan = metrics  # of this epoch; the mean at its end blocks and has another one
            if step % 10 == 0:
                jax.block_until_ready(loss)  # not further ahead of the devices
            epoch_ends = step % epoch == 0
            if epoch_ends:
                mean = jdaso.consensus(exchange, state[:2])  # BatchNorm's statistics differ
                loss = jdaso.consensus(exchange, jnp.stack(losses).mean())
                accuracy = evaluate(*mean)
                record.epoch(step, jax.device_get(plan), loss=loss, test_accuracy=accuracy)
                losses = []
            stop = preemption.requested(exchange) and step < total
            if stop or epoch_ends:
                checkpoints.save(step, (state, epoch))
            if stop:
                break
    checkpoints.close()
    if stop:
        return jdaso.cluster.EXIT_TRY_AGAIN  # asks the job script to start it again
    params, stats = jdaso.consensus(exchange, state[:2])  # cool-down has merged everything
    if node == 0:
        with StandardCheckpointer() as writer:
            writer.save(args.out.absolute() / "model", [params, stats], force=True)
    record.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
