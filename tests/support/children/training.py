"""The loop of the examples on digits with a network that compiles at once; takes its options.

With SIGNAL=NAME:PATTERN:SECONDS in the environment the process of rank 1 sends itself a signal, so
many seconds after a file that fits the pattern is in the folder of checkpoints. PAUSE is the time
that a step takes longer, in seconds. Neither matters in a job that Slurm has started again.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import optax

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "papers"))

import compile_in_turn  # noqa: F401
import config
import data
import loop
from classification import Classification
from flax import nnx
from steps import Task


class Network(nnx.Module):
    """A convolution, a norm and a linear layer."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name="local", rngs=rngs)
        self.head = nnx.Linear(128, 10, rngs=rngs)

    def __call__(self, images, train):
        x = nnx.relu(self.norm(self.conv(images / 255.0), use_running_average=not train))
        return self.head(x.reshape(len(x), -1))


def task(keys):
    digits = data.load(keys)
    if "FEWER" in os.environ:
        digits = digits._replace(train=digits.train._replace(size=digits.train.size - 1))
    return Task(
        dataset=digits,
        model=Network(nnx.Rngs(keys.seed)),
        loss=lambda out, y: optax.softmax_cross_entropy_with_integer_labels(out, y).mean(),
        counts=lambda out, y: jnp.stack([(out.argmax(-1) == y).sum(), (y >= 0).sum()]),
        score=lambda counts: {"test_accuracy": float(counts[0] / counts[1])},
    )


def send(name, folder, pattern, seconds):
    while not any(folder.glob(pattern)):
        time.sleep(1e-4)
    time.sleep(seconds)
    os.kill(os.getpid(), signal.Signals[name])


def with_pauses(batches, seconds):
    for batch in batches:
        time.sleep(seconds)
        yield batch


def main(keys, task):
    first = "SLURM_RESTART_COUNT" not in os.environ
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if "SIGNAL" in os.environ and rank == "1" and first:
        name, pattern, seconds = os.environ["SIGNAL"].split(":")
        arguments = (name, Path(keys.out) / "checkpoints", pattern, float(seconds))
        threading.Thread(target=send, args=arguments, daemon=True).start()
    if "PAUSE" in os.environ and first:
        pause, batches = float(os.environ["PAUSE"]), loop.training_batches
        loop.training_batches = lambda *start: with_pauses(batches(*start), pause)
    return loop.run(keys, task)


if __name__ == "__main__":
    sys.exit(main(config.parse(defaults=Classification()), task))
