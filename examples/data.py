"""Images: scikit-learn's digits, or folders of JPEG and PNG files as ImageNet has them.

Processes never talk about data. Each computes the same permutation of an epoch from (seed, epoch)
and takes its own part of it, so all take the same number of steps and share no image.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from jdaso import study

SUFFIXES = (".jpg", ".jpeg", ".png")
DECODERS = 16  # threads; Pillow lets others run while it decodes
BATCHES_AHEAD = 2
MIN_AREA = 0.25  # of a random crop; ImageNet's usual 0.08 pays off in long trainings only

Batch = tuple[np.ndarray, np.ndarray]


class Split(NamedTuple):
    """Labels, int32, and ``load(index, rng)``: one uint8 image, augmented if there is an rng."""

    labels: np.ndarray
    load: Callable[[int, np.random.Generator | None], np.ndarray]


class Dataset(NamedTuple):
    train: Split
    test: Split
    num_classes: int
    channels: int


def load(data: str, image_size: int) -> Dataset:
    """``digits``, in their own size, or a folder with train/<class>/ and val/<class>/ or test/."""
    return digits() if data == "digits" else folder(Path(data), image_size)


def steps_per_epoch(num_images: int, num_parts: int, batch_size: int) -> int:
    """Training steps of an epoch, the same in every process."""
    steps = num_images // (num_parts * batch_size)
    if steps == 0:
        raise ValueError(
            f"batch_size: {num_parts} processes take {batch_size} images each at a step, but "
            f"there are {num_images} in all; lower --batch-size."
        )
    return steps


def train_indices(
    num_images: int, part: int, num_parts: int, batch_size: int, seed: int, epoch: int
) -> np.ndarray:
    """Numbers of the images of one process in one epoch, of shape (steps, batch_size).

    The remainder that does not fill a batch everywhere is left out, another one in every epoch.
    """
    steps = steps_per_epoch(num_images, num_parts, batch_size)
    order = np.random.default_rng((seed, epoch)).permutation(num_images)
    return order[: steps * num_parts * batch_size].reshape(steps, num_parts, batch_size)[:, part]


def test_indices(num_images: int, part: int, num_parts: int, batch_size: int) -> np.ndarray:
    """The process's part of all images, of shape (steps, batch_size); -1 where none is left."""
    steps = -(-num_images // (num_parts * batch_size))
    order = np.full(steps * num_parts * batch_size, -1)
    order[:num_images] = np.arange(num_images)
    return order.reshape(steps, num_parts, batch_size)[:, part]


def train_batches(
    split: Split, part: int, num_parts: int, batch_size: int, seed: int, epoch: int
) -> Iterator[Batch]:
    """Images and labels; how an image is augmented depends on seed and epoch alone."""

    def load(index):
        return split.load(index, np.random.default_rng((seed, epoch, index)))

    indices = train_indices(len(split.labels), part, num_parts, batch_size, seed, epoch)
    return _ahead(load, split.labels, indices)


def test_batches(split: Split, part: int, num_parts: int, batch_size: int) -> Iterator[Batch]:
    """Images and labels; a label of -1 marks what only fills the batch."""
    indices = test_indices(len(split.labels), part, num_parts, batch_size)
    labels = np.append(split.labels, np.int32(-1))  # which index -1 finds
    return _ahead(lambda index: split.load(max(index, 0), None), labels, indices)


def _ahead(load: Callable, labels: np.ndarray, indices: np.ndarray) -> Iterator[Batch]:
    """Batches; the next ones are decoded while the devices work on the last."""
    with ThreadPoolExecutor(DECODERS) as pool:
        waiting = collections.deque()
        for batch in indices:
            waiting.append((pool.map(load, batch.tolist()), labels[batch]))
            if len(waiting) > BATCHES_AHEAD:
                images, batch_labels = waiting.popleft()
                yield np.stack(list(images)), batch_labels
        for images, batch_labels in waiting:
            yield np.stack(list(images)), batch_labels


def digits() -> Dataset:
    """1797 images of 8x8 pixels; the 360 test images are always the same."""
    data = study.digits()

    def split(images, labels):
        padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))

        def load(index, rng):
            if rng is None:
                return images[index]
            top, left = rng.integers(0, 3, 2)  # shifted by up to one pixel
            return padded[index, top : top + 8, left : left + 8]

        return Split(labels, load)

    train, test = (data.images, data.labels), (data.test_images, data.test_labels)
    return Dataset(split(*train), split(*test), num_classes=10, channels=1)


def folder(root: Path, image_size: int) -> Dataset:
    """ImageNet's layout; val/ is preferred to test/, whose labels ImageNet keeps to itself."""
    train, test = root / "train", root / "val"
    if not test.is_dir():
        test = root / "test"
    for path in (train, test):
        if not path.is_dir():
            raise ValueError(f"data: {root} needs train/ and val/ or test/, found no {path}.")
    classes, test_classes = (
        sorted(path.name for path in side.iterdir() if path.is_dir()) for side in (train, test)
    )
    if not classes:
        raise ValueError(f"data: {train} holds no folder; it needs one for each class.")
    if classes != test_classes:
        raise ValueError(
            f"data: {train} and {test} must hold the same classes, only one of them has "
            f"{', '.join(sorted(set(classes) ^ set(test_classes)))}."
        )

    def split(side):
        paths, labels = [], []
        for label, name in enumerate(classes):
            found = sorted(x for x in os.listdir(side / name) if x.lower().endswith(SUFFIXES))
            if not found:
                raise ValueError(f"data: {side / name} holds no image ({', '.join(SUFFIXES)}).")
            paths += [f"{side}/{name}/{x}" for x in found]
            labels += [label] * len(found)
        return Split(
            np.array(labels, np.int32), lambda index, rng: read_image(paths[index], image_size, rng)
        )

    return Dataset(split(train), split(test), num_classes=len(classes), channels=3)


def read_image(path: str, size: int, rng: np.random.Generator | None) -> np.ndarray:
    """A random crop, resized and perhaps mirrored; without rng the middle 7/8 of the square."""
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"data: {path} is not a readable image ({error}); replace it.") from error
    width, height = image.size
    if rng is None:
        w = h = min(width, height) * 7 / 8
        left, top = (width - w) / 2, (height - h) / 2
    else:
        area, ratio = rng.uniform(MIN_AREA, 1), np.exp(rng.uniform(-1, 1) * np.log(4 / 3))
        side = np.sqrt(area * width * height)
        w, h = min(side * np.sqrt(ratio), width), min(side / np.sqrt(ratio), height)
        left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    image = image.resize((size, size), Image.Resampling.BILINEAR, (left, top, left + w, top + h))
    pixels = np.asarray(image)
    return pixels[:, ::-1] if rng is not None and rng.random() < 0.5 else pixels
