"""Image data sets in memory, and their division among the nodes of a virtual cluster."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from jdaso.core.command_line import local_path

SUFFIXES = (".jpg", ".jpeg", ".png")


class Images(NamedTuple):
    """Images and labels for training and testing.

    Images are uint8 of shape (number, height, width, channels), labels int32 of shape (number,).
    """

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits() -> Images:
    """scikit-learn's digits: 1437 training images of 8x8 pixels and a fixed set of 360 test images.

    Raises:
        ImportError: If scikit-learn is not installed.

    >>> digits().images.shape
    (1437, 8, 8, 1)
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(
            "The digits are part of scikit-learn, which is not installed: pip install scikit-learn"
        ) from error
    images, labels = load_digits(return_X_y=True)
    images = (images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=360, stratify=labels, random_state=0
    )
    return Images(images, labels, test_images, test_labels)


def folder(root: Path | str, size: int = 32) -> Images:
    """Loads all images of a folder in ImageNet's layout.

    Args:
        root: A folder with ``train/<class>/*`` and ``val/<class>/*`` or ``test/<class>/*``.
        size: Height and width to which images are resized, in pixels.

    Returns:
        Images with three channels. Classes are numbered in the order of their names.

    Raises:
        ImportError: If Pillow is not installed.
        ValueError: If folders or images are missing, or if the two parts have different classes.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "Pillow, which decodes images, is not installed: pip install pillow"
        ) from error
    root = local_path(root, "data")
    train, test = root / "train", root / "val"
    test = test if test.is_dir() else root / "test"
    splits = []
    for split in (train, test):
        classes = sorted(x.name for x in split.iterdir() if x.is_dir()) if split.is_dir() else []
        paths = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((split / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not paths:
            raise ValueError(
                f"data: found no {split}/<class>/*.jpg; {root} must have train/ and test/."
            )
        images = np.empty((len(paths), size, size, 3), np.uint8)
        for image, (path, _) in zip(images, paths, strict=True):
            with Image.open(path) as file:
                image[:] = np.asarray(file.convert("RGB").resize((size, size)))
        splits.append((classes, images, np.array([label for _, label in paths], np.int32)))
    (classes, images, labels), (test_classes, test_images, test_labels) = splits
    if classes != test_classes:
        raise ValueError(f"data: {train} and {test} must have the same classes.")
    return Images(images, labels, test_images, test_labels)


def batches(num_images: int, nodes: int, batch_size: int, epochs: int, seed: int = 0) -> np.ndarray:
    """The indices of the images that each node takes at each step.

    Each epoch is a random permutation of all images, which is divided among the nodes. Images that
    do not fill a batch on every node are left out of the epoch.

    Args:
        num_images: Number of images.
        nodes: Number of nodes.
        batch_size: Images per node and step.
        epochs: Number of passes over the images.
        seed: Seed of the permutations.

    Returns:
        An int array of shape ``(steps, nodes, batch_size)``.

    Raises:
        ValueError: If there are fewer images than one step of all nodes needs.

    >>> batches(num_images=100, nodes=4, batch_size=8, epochs=2).shape
    (6, 4, 8)
    """
    return np.concatenate(
        [epoch_batches(num_images, nodes, batch_size, seed, epoch) for epoch in range(epochs)]
    )


def epoch_batches(
    num_images: int, nodes: int, batch_size: int, seed: int, epoch: int
) -> np.ndarray:
    """The steps of one epoch of :func:`batches`."""
    steps = steps_per_epoch(num_images, nodes, batch_size)
    order = np.random.default_rng((seed, epoch)).permutation(num_images)
    return order[: steps * nodes * batch_size].reshape(steps, nodes, batch_size)


def steps_per_epoch(num_images: int, nodes: int, batch_size: int) -> int:
    """The number of steps of an epoch, the same on every node."""
    steps = num_images // (nodes * batch_size)
    if steps == 0:
        raise ValueError(
            f"batch_size must be at most {num_images // nodes}, because {nodes} nodes or processes "
            f"share {num_images} images, got {batch_size}; choose a smaller batch."
        )
    return steps
