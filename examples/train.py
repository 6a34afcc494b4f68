"""Trains a ResNet on several nodes, with DASO or one of its relatives.

    mpiexec -n 2 python examples/train.py --devices 2 --out runs/demo
    srun -K python examples/train.py --config examples/configs/imagenet_resnet50_daso.py \\
        --data /data/imagenet --out runs/imagenet --resume

Gradients are averaged over the devices of a node at every step, parameters between nodes as
--sync says. Without an MPI launcher there is one node.
"""

from __future__ import annotations

import dataclasses
import sys

import data
import jax
import jax.numpy as jnp
import loop
import models
import numpy as np
import optax
from config import Config, parse
from steps import Task


def classification(config: Config) -> Task:
    """A residual network that tells what an image shows."""
    size = config.image_size or models.IMAGE_SIZE[config.model]
    dataset = data.load(dataclasses.replace(config, image_size=size))
    dtype = jnp.dtype(config.compute_dtype)
    classes = dataset.num_classes
    model = models.create(config.model, dataset.channels, classes, config.seed, dtype)

    def loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
        smooth = optax.smooth_labels(jax.nn.one_hot(labels, classes), config.label_smoothing)
        return optax.softmax_cross_entropy(logits, smooth).mean()

    def counts(logits: jax.Array, labels: jax.Array) -> jax.Array:
        right = logits.argmax(axis=-1) == labels  # a label of -1 is never right
        return jnp.stack([right.sum(), (labels >= 0).sum()]).astype(jnp.float32)

    def score(counts: np.ndarray) -> dict[str, float]:
        return {"test_accuracy": float(counts[0] / counts[1])}

    return Task(dataset, model, loss, counts, score)


if __name__ == "__main__":
    sys.exit(loop.run(parse(description=__doc__), classification))
