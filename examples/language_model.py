"""Trains a language model with Streaming DiLoCo: nodes exchange one part of it after the other.

    mpiexec -n 2 python examples/language_model.py
    srun -K python examples/language_model.py --data /data/text --layers 12 --width 896

Each process is a node with all its devices, and trains a transformer with AdamW on its own part of
the text. The layers are dealt to fragments. Once in a period each fragment is sent, in 4 bits for
each parameter. The mean arrives 5 steps later. An outer optimizer moves an anchor toward it, and
each node goes half the way to the anchor. A training continues from the last checkpoint in --out.
"""

import argparse
import functools
import math
import re
import sys
import sysconfig
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import StandardCheckpointer
from record import Record

import jdaso
from jdaso.core.command_line import path_option

VOCABULARY, HEAD = 256, 32  # a token is a byte, and an attention head has 32 numbers


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--data", type=path_option, help="folder of text files, in place of Python's library")
    add("--out", type=path_option, default="runs/language_model", help="folder of the results")
    add("--steps", type=int, default=3000, help="optimizer steps")
    add("--evaluate-every", type=int, default=300, help="steps between two evaluations")
    add("--context", type=int, default=128, help="bytes of a sequence")
    add("--batch-size", type=int, default=16, help="sequences per device and step")
    add("--learning-rate", type=float, default=3e-3, help="peak of AdamW")
    add("--period", type=int, default=30, help="steps between two exchanges of a fragment")
    add("--delay", type=int, default=5, help="steps after which an exchange is merged")
    add("--fragments", type=int, default=2, help="parts of the model")
    add("--outer-rate", type=float, default=0.4, help="learning rate of the outer optimizer")
    add("--outer-warmup", type=int, default=10, help="first rounds, which are plain averaging")
    add("--wire", default="float4", help="format on the network, such as float32")
    add("--layers", type=int, default=6, help="blocks of the transformer")
    add("--width", type=int, default=128, help=f"length of its vectors, a multiple of {HEAD}")
    add("--bfloat16", action="store_true", help="compute activations in bfloat16")
    add("--devices", type=int, help="virtual CPU devices per process, in place of the real ones")
    return parser.parse_args()


def read(folder: Path | None) -> np.ndarray:
    """The bytes of all files in a random order, which is the same on all nodes."""
    root = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*" if folder else "*.py") if path.is_file())
    if not folder:
        paths = [path for path in paths if "site-packages" not in path.parts]
    if not paths:
        raise SystemExit(f"--data must be a folder of text files; {root} has none.")
    order = np.random.default_rng(0).permutation(len(paths))
    return np.frombuffer(b"\n".join(paths[i].read_bytes() for i in order), np.uint8)


class Block(nnx.Module):
    """Attention and SwiGLU, each with a norm before it and a shortcut around it."""

    def __init__(self, args, dtype, rngs):
        width, hidden = args.width, 8 * (args.width // 3)
        norm = functools.partial(nnx.RMSNorm, width, dtype=dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        small = nnx.initializers.variance_scaling(0.5 / args.layers, "fan_in", "normal")
        self.norm_attention, self.norm_hidden = norm(), norm()
        self.query_key_value = linear(width, 3 * width)
        self.attention_out = linear(width, width, kernel_init=small)
        self.gate_and_hidden = linear(width, 2 * hidden)
        self.hidden_out = linear(hidden, width, kernel_init=small)

    def __call__(self, x):
        qkv = self.query_key_value(self.norm_attention(x)).reshape(*x.shape[:2], 3, -1, HEAD)
        query, key, value = rotated(qkv[:, :, 0]), rotated(qkv[:, :, 1]), qkv[:, :, 2]
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.reshape(x.shape))
        gate, hidden = jnp.split(self.gate_and_hidden(self.norm_hidden(x)), 2, axis=-1)
        return x + self.hidden_out(nnx.silu(gate) * hidden)


def rotated(x):
    """Rotates pairs of numbers by angles that grow with the position (arXiv:2104.09864)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)
    a, b, cos, sin = x[..., :half], x[..., half:], jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


class Transformer(nnx.Module):
    """Predicts the next byte at every position, with tied embeddings."""

    def __init__(self, args, dtype, rngs):
        normal = nnx.initializers.normal(0.02)
        options = {"dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(VOCABULARY, args.width, embedding_init=normal, **options)
        self.layers = nnx.List([Block(args, **options) for _ in range(args.layers)])
        self.norm = nnx.RMSNorm(args.width, **options)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


def main() -> int:
    args = options()
    if args.devices:
        jdaso.cluster.use_virtual_devices(args.devices)
    topology = jdaso.discover_topology(processes_per_node=1)
    exchange = jdaso.mpi_exchange(topology)
    node, nodes, devices = topology.node, topology.num_nodes, topology.num_local_devices

    # Data: a twentieth of the text is held out, and each node trains on its own part of the rest.
    text, length = read(args.data), args.context + 1
    held_out, rest = np.split(text, [len(text) // 20])
    share = np.array_split(rest, nodes)[node]
    batch_size = args.batch_size * devices  # of a node

    def batches(begin: int):
        """Sequences at random places. A batch depends on the step only."""

        def sequence(index: int, rng: np.random.Generator):
            start = rng.integers(len(share) - length)
            return share[start : start + length].astype(np.int32)

        places = grain.MapDataset.range(args.steps * batch_size).seed(0)
        sequences = places.random_map(sequence).batch(batch_size)[begin:]
        return iter(sequences.to_iter_dataset(grain.ReadOptions(2, 16)))  # threads, batches

    # Model and optimizer, which start with the same numbers on all nodes.
    dtype = jnp.bfloat16 if args.bfloat16 else jnp.float32
    rngs = nnx.Rngs(jax.random.key(0, impl="rbg"))  # compiles faster than the default
    graphdef, params = nnx.split(Transformer(args, dtype, rngs))

    def fragment_of(path) -> int:
        """Deals the layers in turn, so that each fragment has layers of all depths."""
        layer = re.search(r"'layers'\]\[(\d+)\]", jax.tree_util.keystr(path))
        return int(layer[1]) % args.fragments if layer else 0

    peak = args.learning_rate
    rate = optax.warmup_cosine_decay_schedule(0, peak, args.steps // 10, args.steps, peak / 20)
    tables = functools.partial(jax.tree.map, lambda x: x.ndim > 1)  # without the norms' scales
    adamw = optax.adamw(rate, b2=0.99, weight_decay=0.1, mask=tables)
    averaging = jdaso.diloco(
        exchange,
        args.period,
        optax.sgd(args.outer_rate, momentum=0.9, nesterov=True),
        delay=args.delay,
        mix=0.5,
        fragments=fragment_of if args.fragments > 1 else 1,
        warmup=args.outer_warmup,
        wire=args.wire,
    )
    tx = jdaso.chain(optax.chain(optax.clip_by_global_norm(1.0), adamw), averaging)
    everywhere, split = (NamedSharding(topology.mesh, spec) for spec in (P(), P("local")))
    params = jdaso.broadcast(exchange, jax.device_put(params, everywhere))
    opt_state = jax.jit(tx.init, out_shardings=everywhere)(params)

    def loss_fn(params, sequences):
        logits, labels = nnx.merge(graphdef, params)(sequences[:, :-1]), sequences[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value_and_grad = jdaso.local_value_and_grad(loss_fn, topology.mesh)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, opt_state, sequences):
        loss, grads = value_and_grad(params, sequences)
        params, opt_state = jdaso.apply_gradients(tx, grads, opt_state, params, value=loss)
        return params, opt_state, loss, jdaso.metrics(opt_state)

    held_out_loss = jax.jit(loss_fn)
    count = min(256, len(held_out) // length) // devices * devices
    tests = held_out[: count * length].reshape(count, length).astype(np.int32)
    tests = jax.device_put(tests, split)

    @jax.jit
    def continued(params, window, keys):
        def draw(window, key):
            logits = nnx.merge(graphdef, params)(window[None])[0, -1]
            byte = jax.random.categorical(key, logits / 0.7)
            return jnp.append(window[1:], byte), byte

        return jax.lax.scan(draw, window, keys)[1]

    # Checkpoints hold the state of each node and what is in flight between them.
    checkpoints = jdaso.checkpoint.Checkpoints(args.out / "checkpoints", topology, exchange)
    checkpoints.claim()
    begin = 0
    if restored := checkpoints.restore((params, opt_state)):
        (params, opt_state), begin = restored.state, restored.step
        if node == 0:
            print(f"continues at step {begin} of {args.steps}")
    per_step = batch_size * nodes * args.context
    record = Record(args.out, topology, exchange, begin, per_step, "tokens")
    losses, stop = [], False
    with jdaso.cluster.Preemption() as preemption:  # SIGTERM, SIGUSR1
        for step, sequences in enumerate(batches(begin), begin + 1):
            sequences = jax.device_put(sequences, split)
            params, opt_state, loss, metrics = train_step(params, opt_state, sequences)
            losses.append(loss)
            if step % 10 == 0:
                jax.block_until_ready(loss)  # not further ahead of the devices
            evaluates = step % args.evaluate_every == 0 or step == args.steps
            if evaluates:
                anchor = jdaso.diloco_anchor(opt_state, params)  # the same on all nodes
                loss = jdaso.consensus(exchange, jnp.stack(losses).mean())
                bits = held_out_loss(anchor, tests) / math.log(2)
                record.epoch(step, jax.device_get(metrics), loss=loss, test_bits_per_byte=bits)
                losses = []
            stop = preemption.requested(exchange) and step < args.steps
            if stop or evaluates:
                checkpoints.save(step, (params, opt_state))
            if stop:
                break
    checkpoints.close()
    if stop:
        return jdaso.cluster.EXIT_TRY_AGAIN  # asks the job script to start it again
    params, opt_state = jdaso.drain(tx, opt_state, params)  # merges what is in flight
    anchor = jdaso.diloco_anchor(opt_state, params)
    if node == 0:
        with StandardCheckpointer() as writer:
            writer.save(args.out.absolute() / "model", anchor, force=True)
        window, keys = jnp.int32(held_out[: args.context]), jax.random.split(jax.random.key(1), 300)
        sample = bytes(continued(anchor, window, keys).tolist()).decode(errors="replace")
        print(f"\nThe model continues a text that it has not seen:\n\n{sample}")
    record.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
