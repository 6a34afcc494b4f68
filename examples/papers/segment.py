"""Trains a network that segments street scenes, the second workload of the DASO paper.

    mpiexec -n 2 python examples/papers/segment.py --devices 2 --out runs/streets
    srun -K python examples/papers/segment.py \\
        --config examples/papers/configs/cityscapes_hrnet_daso.py \\
        --data /data/cityscapes --out runs/cityscapes --resume

The training loop, the algorithms and most options are those of train.py. Only the options of data
and model differ.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import loop
from config import Config, key, parse
from flax import nnx
from segmentation import attention, intersection_over_union
from segmentation.cityscapes import cityscapes
from segmentation.streets import streets
from steps import Task

from jdaso.core.command_line import local_path


@dataclass(frozen=True)
class Segmentation(Config):
    """The keys of segment.py."""

    model: str = key("hrnet", "name of the network", ("hrnet",))
    data: str = key("streets", "streets (drawn images), or a folder in Cityscapes' layout")
    widths: tuple[int, ...] = key((32, 64), "channels of the HRNet's branches", "[1, inf)")
    blocks: int = key(1, "residual blocks between two fusions of the branches", "[1, inf)")
    height: int = key(64, "pixels of a street, or of a random crop", "[16, inf)")
    width: int = key(128, "pixels of a street, or of a random crop", "[16, inf)")
    num_train: int = key(512, "number of drawn streets for training", "[1, inf)")
    num_test: int = key(128, "number of drawn streets for testing", "[1, inf)")


def task(config: Segmentation) -> Task:
    """Creates data, model and loss of a configuration."""
    size = (config.height, config.width)
    if config.data == "streets":
        dataset = streets(*size, config.num_train, config.num_test)
    else:
        dataset = cityscapes(local_path(config.data, "data"), size)
    model = attention.MultiScaleAttention(
        dataset.channels,
        dataset.num_classes,
        nnx.Rngs(jax.random.key(config.seed, impl="rbg")),  # compiles fast, see models.py
        widths=config.widths,
        blocks=config.blocks,
        dtype=jnp.dtype(config.compute_dtype),
    )

    def counts(prediction: attention.Prediction, labels: jax.Array) -> jax.Array:
        return intersection_over_union.counts(prediction.logits, labels)

    return Task(dataset, model, attention.loss, counts, intersection_over_union.score)


if __name__ == "__main__":
    defaults = Segmentation(epochs=10, batch_size=8, learning_rate=0.05, out="runs/segment")
    sys.exit(loop.run(parse(description=__doc__, defaults=defaults), task))
