"""Images in memory, and which of them every node of a virtual cluster takes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

SUFFIXES = (".jpg", ".jpeg", ".png")


class Images(NamedTuple):
    """Images, uint8 of shape (number, height, width, channels), and their int32 labels."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def digits() -> Images:
    """scikit-learn's digits: 1437 images of 8x8 pixels, and always the same 360 to test.

    Raises:
        ImportError: without scikit-learn.

    >>> digits().images.shape
    (1437, 8, 8, 1)
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError("The digits come with scikit-learn: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    images = (images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    images, test_images, labels, test_labels = train_test_split(
        images, labels.astype(np.int32), test_size=360, stratify=labels, random_state=0
    )
    return Images(images, labels, test_images, test_labels)


def folder(root: Path | str, size: int = 32) -> Images:
    """Images in ImageNet's layout, ``train/<class>/*`` and ``val/`` or ``test/``, all in memory.

    Args:
        root: the folder that holds ``train``.
        size: height and width to which images are resized.

    Returns:
        Images with three channels; classes are numbered in the order of their names.

    Raises:
        ImportError: without Pillow.
        ValueError: if folders or images are missing, or classes differ.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("Images are decoded with Pillow: pip install pillow") from error
    train, test = Path(root) / "train", Path(root) / "val"
    test = test if test.is_dir() else Path(root) / "test"
    sides = []
    for side in (train, test):
        classes = sorted(x.name for x in side.iterdir() if x.is_dir()) if side.is_dir() else []
        paths = [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((side / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        if not paths:
            raise ValueError(f"data: found no {side}/<class>/*.jpg; {root} needs train/ and test/.")
        images = np.empty((len(paths), size, size, 3), np.uint8)
        for image, (path, _) in zip(images, paths, strict=True):
            with Image.open(path) as file:
                image[:] = np.asarray(file.convert("RGB").resize((size, size)))
        sides.append((classes, images, np.array([label for _, label in paths], np.int32)))
    (classes, images, labels), (test_classes, test_images, test_labels) = sides
    if classes != test_classes:
        raise ValueError(f"data: {train} and {test} must hold the same classes.")
    return Images(images, labels, test_images, test_labels)


def batches(num_images: int, nodes: int, batch_size: int, epochs: int, seed: int = 0) -> np.ndarray:
    """Which images every node takes at every step.

    An epoch is one permutation of all images, of which every node takes its own part; what does
    not fill a batch of all nodes is left out.

    Args:
        num_images: how many there are.
        nodes: members of the cluster.
        batch_size: images of one node at one step.
        epochs: times that the images are gone through.
        seed: of the permutations.

    Returns:
        int array of shape ``(steps, nodes, batch_size)``.

    Raises:
        ValueError: if there are fewer images than one step of all nodes takes.

    >>> batches(num_images=100, nodes=4, batch_size=8, epochs=2).shape
    (6, 4, 8)
    """
    steps = num_images // (nodes * batch_size)
    if steps == 0:
        raise ValueError(
            f"batch_size: {nodes} nodes take {batch_size} images each at a step, but there are "
            f"{num_images} in all; choose fewer nodes or a smaller batch."
        )
    orders = [np.random.default_rng((seed, e)).permutation(num_images) for e in range(epochs)]
    taken = [order[: steps * nodes * batch_size] for order in orders]
    return np.stack(taken).reshape(epochs * steps, nodes, batch_size)
