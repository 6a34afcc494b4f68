"""Images to train on: scikit-learn's digits, folders in ImageNet's layout, or synthetic ones."""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SUFFIXES = (".jpg", ".jpeg", ".png")
THREADS = min(16, os.cpu_count() or 1)  # each loads a whole batch


class Images(NamedTuple):
    """The number of images, and ``(index, rng) -> (uint8 image, label)``.

    With a random generator the image is augmented.
    """

    size: int
    load: Callable[[int, np.random.Generator | None], tuple[np.ndarray, np.int32]]


def load(data: str | Path, pixels: int) -> tuple[Images, Images, int, int]:
    """Images to train on and to test on, and the numbers of classes and of channels."""
    if str(data) == "digits":
        return digits()
    if str(data) == "synthetic":
        images = np.random.default_rng(0).integers(0, 256, (16, pixels, pixels, 3), np.uint8)
        draw = functools.partial(synthetic_image, images)
        return Images(50_000, draw), Images(1000, draw), 1000, 3
    folders = [Path(data) / "train", Path(data) / "val"]
    if not folders[1].is_dir():
        folders[1] = Path(data) / "test"
    classes = sorted(path.name for path in folders[0].glob("*") if path.is_dir())
    if not classes:
        raise ValueError(f"data must be digits, synthetic, or a folder with train/, got {data}.")
    train, test = (folder(path, classes, pixels) for path in folders)
    return train, test, len(classes), 3


def digits() -> tuple[Images, Images, int, int]:
    """scikit-learn's 1797 images of 8 x 8 pixels, of which 360 are for testing."""
    images, labels = load_digits(return_X_y=True)
    images = np.uint8(images * (255 / 16)).reshape(-1, 8, 8, 1)
    images = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = (
        Images(len(part), functools.partial(digit, images[part], np.int32(labels[part])))
        for part in (order[:360], order[360:])
    )
    return train, test, 10, 1


def digit(images, labels, index, rng):
    top, left = (1, 1) if rng is None else rng.integers(0, 3, 2)  # moves it by up to one pixel
    return images[index, top : top + 8, left : left + 8], labels[index]


def synthetic_image(images, index, rng):
    return images[index % len(images)], np.int32(index % 1000)


def folder(root: Path, classes: list[str], pixels: int) -> Images:
    """The images in ``root/<class>/``."""
    found = [
        (path, label)
        for label, name in enumerate(classes)
        for path in sorted((root / name).glob("*"))
        if path.suffix.lower() in SUFFIXES
    ]
    if not found:
        raise ValueError(f"data: {root} has no <class>/*.jpg of the classes in train/.")
    paths, labels = zip(*found, strict=True)
    return Images(len(paths), functools.partial(file, paths, np.int32(labels), pixels))


def file(paths, labels, pixels, index, rng):
    """A random crop, resized and perhaps mirrored; without ``rng`` the center."""
    with Image.open(paths[index]) as opened:
        width, height = opened.size
        if rng is None:
            w = h = min(width, height) * 7 / 8  # 224 of 256 pixels
            left, top = (width - w) / 2, (height - h) / 2
        else:
            area, ratio = rng.uniform(0.08, 1) * width * height, (4 / 3) ** rng.uniform(-1, 1)
            w, h = min(width, (area * ratio) ** 0.5), min(height, (area / ratio) ** 0.5)
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
        box = (left, top, left + w, top + h)
        image = opened.convert("RGB").resize((pixels, pixels), Image.Resampling.BILINEAR, box)
    mirrored = rng is not None and rng.random() < 0.5
    return np.asarray(image)[:, :: -1 if mirrored else 1], labels[index]


def batches(
    images: Images, node: int, nodes: int, batch_size: int, epochs: int, seed: int, begin: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A node's batches from step ``begin`` on.

    All nodes shuffle the images alike in every epoch, and each takes its own share. What does not
    fill a batch on every node is left out. A batch depends on the seed and the step only, so a
    training that continues gets the same batches.
    """
    used = images.size // (nodes * batch_size) * nodes * batch_size
    shuffled = grain.MapDataset.range(images.size).seed(seed).shuffle()
    share = shuffled[node:used:nodes].repeat(epochs).random_map(images.load)
    share = share.batch(batch_size)[begin:]
    return iter(share.to_iter_dataset(grain.ReadOptions(THREADS, THREADS)))


def test_batches(
    images: Images, node: int, nodes: int, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """A node's share of all images. The label -1 marks what only fills the last batch."""
    count = -(-images.size // (nodes * batch_size)) * batch_size
    indices = np.arange(node, count * nodes, nodes)

    def load(index: int):
        image, label = images.load(min(index, images.size - 1), None)
        return image, label if index < images.size else np.int32(-1)

    share = grain.MapDataset.source(indices).map(load).batch(batch_size)
    return iter(share.to_iter_dataset(grain.ReadOptions(THREADS, THREADS)))
