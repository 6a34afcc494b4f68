"""Data sets: scikit-learn's digits, folders as ImageNet has them, and noise to measure with."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from augment import Crop, read_image

from jdaso import study

SUFFIXES = (".jpg", ".jpeg", ".png")
SYNTHETIC_DISTINCT = 16  # images, which are then repeated
SYNTHETIC_TEST_IMAGES = 1000

# Images, uint8 of shape (batch, height, width, channels), and labels, int32 of shape (batch, ...).
Batch = tuple[np.ndarray, np.ndarray]


class Split(NamedTuple):
    """Images to train with or to test.

    Attributes:
        size: how many.
        load: ``(index, rng) -> (image, label)``: uint8 of shape (height, width, channels),
            augmented if there is an rng, and int32 of any shape, -1 where nothing is to be
            learnt. It is sent to worker processes, so it must be picklable.
    """

    size: int
    load: Callable[[int, np.random.Generator | None], tuple[np.ndarray, np.ndarray]]


class Dataset(NamedTuple):
    """What a model is trained and tested with."""

    train: Split
    test: Split
    num_classes: int
    channels: int


def load(config) -> Dataset:
    """The data set of a configuration.

    Args:
        config: has ``data``: ``"digits"``, ``"synthetic"`` or a folder with train/<class>/ and
            val/<class>/ or test/<class>/. Folders need ``image_size``, ``augment``, ``padding``
            and ``min_area``, see :class:`augment.Crop`; ``"synthetic"`` needs ``image_size``,
            ``num_classes`` and ``synthetic_images``.

    Raises:
        ValueError: if a setting is out of its range, or a folder not as described.
    """
    if config.data == "digits":
        return digits()
    if config.data == "synthetic":
        return synthetic(config.synthetic_images, config.image_size, config.num_classes)
    crop = Crop(config.augment, config.image_size, config.padding, config.min_area)
    return folder(Path(config.data), crop)


def digits() -> Dataset:
    """1797 images of 8x8 pixels; the 360 test images are always the same."""
    data = study.digits()

    def split(images, labels):
        padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return Split(len(labels), functools.partial(_digit, padded, labels))

    train, test = (data.images, data.labels), (data.test_images, data.test_labels)
    return Dataset(split(*train), split(*test), num_classes=10, channels=1)


def synthetic(num_images: int, image_size: int, num_classes: int) -> Dataset:
    """Noise that costs nothing to make, to find out how fast a model trains."""
    if min(num_images, num_classes) < 1:
        raise ValueError(
            "synthetic_images and num_classes must be at least 1, "
            f"got {num_images} and {num_classes}."
        )
    shape = (SYNTHETIC_DISTINCT, image_size, image_size, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    load = functools.partial(_synthetic, images, num_classes)
    test = Split(min(num_images, SYNTHETIC_TEST_IMAGES), load)
    return Dataset(Split(num_images, load), test, num_classes, channels=3)


def folder(root: Path, crop: Crop) -> Dataset:
    """ImageNet's layout; val/ is preferred to test/, whose labels ImageNet keeps to itself."""
    train, test = root / "train", root / "val"
    if not test.is_dir():
        test = root / "test"
    for side in (train, test):
        if not side.is_dir():
            missing = side if side == train else f"{root}/val and no {side}"
            raise ValueError(f"data: {root} needs train/ and val/ or test/, found no {missing}.")
    classes, test_classes = _classes(train), _classes(test)
    if classes != test_classes:
        raise ValueError(
            f"data: {train} and {test} must hold the same classes, only one of them has "
            f"{', '.join(sorted(set(classes) ^ set(test_classes)))}."
        )
    splits = (_folder_split(side, classes, crop) for side in (train, test))
    return Dataset(*splits, num_classes=len(classes), channels=3)


def _classes(side: Path) -> list[str]:
    """Names of the folders in one."""
    classes = sorted(entry.name for entry in _entries(side) if entry.is_dir())
    if not classes:
        raise ValueError(f"data: {side} holds no folder; it needs one for each class.")
    return classes


def _folder_split(side: Path, classes: list[str], crop: Crop) -> Split:
    names, labels = [], []
    for label, name in enumerate(classes):
        entries = _entries(side / name)
        found = sorted(x.name for x in entries if x.name.lower().endswith(SUFFIXES))
        if not found:
            raise ValueError(f"data: {side / name} holds no image ({', '.join(SUFFIXES)}).")
        names += [os.fsencode(f"{name}/{x}") for x in found]
        labels += [label] * len(found)
    # Every worker gets a copy: one array is a third of as many strings, and sent at once.
    files = functools.partial(_file, side, np.array(names), np.array(labels, np.int32), crop)
    return Split(len(labels), files)


def _entries(path: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"data: {path} cannot be listed ({error.strerror}).") from error


def _file(side, names, labels, crop, index, rng):
    path = os.path.join(side, os.fsdecode(names[index]))
    return read_image(path, crop, rng), labels[index]


def _digit(padded, labels, index, rng):
    top, left = (1, 1) if rng is None else rng.integers(0, 3, 2)  # shifted by up to one pixel
    return padded[index, top : top + 8, left : left + 8], labels[index]


def _synthetic(images, num_classes, index, rng):
    return images[index % len(images)], np.int32(index % num_classes)
