"""Image classification: residual networks on digits, CIFAR or ImageNet."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import data
import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from config import Config, key, option
from steps import Task


@dataclass(frozen=True)
class Classification(Config):
    """The keys of train.py."""

    model: str = key(
        "resnet20",
        "name of the network",
        ("resnet18", "resnet20", "resnet34", "resnet50", "resnet101"),
    )
    data: str = key("digits", "digits, synthetic, or a folder with train/ and val/ or test/")
    image_size: int = key(0, "pixels; 0 uses the size of the model", "[0, inf)")
    augment: str = key(
        "random_resized_crop", "kind of crop", ("random_resized_crop", "random_crop")
    )
    padding: int = key(0, "pixels on each side before a random crop", "[0, inf)")
    min_area: float = key(0.25, "smallest random resized crop; usual for ImageNet: 0.08", "(0, 1]")
    num_classes: int = key(1000, "classes of synthetic images", "[1, inf)")
    synthetic_images: int = key(50_000, "synthetic images in an epoch", "[1, inf)")
    label_smoothing: float = key(0.0, "fraction of a label spread over all classes", "[0, 1)")


#: Keys that have an effect only with one value of another key.
NEEDS = {
    "padding": ("augment", "random_crop"),
    "num_classes": ("data", "synthetic"),
    "synthetic_images": ("data", "synthetic"),
}


def task(config: Classification) -> Task:
    """Creates data, model and loss of a configuration."""
    for name, (chooser, needed) in NEEDS.items():
        chosen = getattr(config, chooser)
        if chosen != needed and getattr(config, name) != getattr(Classification, name):
            text = f"{option(name)} has no effect with {option(chooser)} {chosen}; leave it out."
            raise SystemExit(text)
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
