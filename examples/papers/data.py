"""Data sets: scikit-learn's digits, image folders in ImageNet's layout, and synthetic images."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import study
from augment import Crop, read_image

from jdaso.core.command_line import local_path

SUFFIXES = (".jpg", ".jpeg", ".png")
SYNTHETIC_DISTINCT = 16  # number of different synthetic images, which are repeated
SYNTHETIC_TEST_IMAGES = 1000

# Images are uint8 of shape (batch, height, width, channels), labels int32 of shape (batch, ...).
Batch = tuple[np.ndarray, np.ndarray]


class Split(NamedTuple):
    """The training images or the test images of a data set.

    Attributes:
        size: Number of images.
        load: ``(index, rng) -> (image, label)``. The image is uint8 of shape (height, width,
            channels) and is augmented if ``rng`` is not None. The label is int32 of any shape, and
            -1 where it is unknown. The function must be picklable for worker processes.
        own_parts: Whether a process trains on the same range of indices in all epochs. Otherwise
            all indices are divided anew in every epoch.
    """

    size: int
    load: Callable[[int, np.random.Generator | None], tuple[np.ndarray, np.ndarray]]
    own_parts: bool = False


class Dataset(NamedTuple):
    """The training and test images, and the sizes that a model depends on.

    ``fingerprint`` is a non-negative int32 that tells data of the same size apart, or 0.
    """

    train: Split
    test: Split
    num_classes: int
    channels: int
    fingerprint: int = 0


def load(config) -> Dataset:
    """Loads the data set of a configuration.

    Args:
        config: Its key ``data`` is ``"digits"``, ``"synthetic"``, or a folder with train/<class>/
            and val/<class>/ or test/<class>/. A folder needs the keys ``image_size``, ``augment``,
            ``padding`` and ``min_area``, see :class:`augment.Crop`. ``"synthetic"`` needs
            ``image_size``, ``num_classes`` and ``synthetic_images``.

    Raises:
        ValueError: If a key is out of its range, or if a folder has another layout.
    """
    if config.data == "digits":
        return digits()
    if config.data == "synthetic":
        return synthetic(config.synthetic_images, config.image_size, config.num_classes)
    crop = Crop(config.augment, config.image_size, config.padding, config.min_area)
    return folder(local_path(config.data, "data"), crop)


def digits() -> Dataset:
    """scikit-learn's 1797 images of 8x8 pixels. The 360 test images are always the same."""
    data = study.digits()

    def split(images, labels):
        padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return Split(len(labels), functools.partial(_digit, padded, labels))

    train, test = (data.images, data.labels), (data.test_images, data.test_labels)
    return Dataset(split(*train), split(*test), num_classes=10, channels=1)


def synthetic(num_images: int, image_size: int, num_classes: int) -> Dataset:
    """Random images without a disk, to measure the speed of a training."""
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
    """Images in ImageNet's layout. ``val/`` comes first; ImageNet does not label ``test/``."""
    train, test = root / "train", root / "val"
    if not test.is_dir():
        test = root / "test"
    for split in (train, test):
        if not split.is_dir():
            missing = split if split == train else f"{root}/val and no {split}"
            raise ValueError(f"data: {root} needs train/ and val/ or test/, found no {missing}.")
    classes, test_classes = _classes(train), _classes(test)
    if classes != test_classes:
        raise ValueError(
            f"data: {train} and {test} must have the same classes, but only one of them has "
            f"{', '.join(sorted(set(classes) ^ set(test_classes)))}."
        )
    splits = (_folder_split(split, classes, crop) for split in (train, test))
    return Dataset(*splits, num_classes=len(classes), channels=3)


def _classes(split: Path) -> list[str]:
    """The names of the subfolders."""
    classes = sorted(entry.name for entry in _entries(split) if entry.is_dir())
    if not classes:
        raise ValueError(f"data: {split} has no subfolder; it needs one for each class.")
    return classes


def _folder_split(root: Path, classes: list[str], crop: Crop) -> Split:
    names, labels = [], []
    for label, name in enumerate(classes):
        entries = _entries(root / name)
        found = sorted(x.name for x in entries if x.name.lower().endswith(SUFFIXES))
        if not found:
            raise ValueError(f"data: {root / name} has no image ({', '.join(SUFFIXES)}).")
        names += [os.fsencode(f"{name}/{x}") for x in found]
        labels += [label] * len(found)
    # Each worker receives a copy. One array takes a third of the memory of a list of strings.
    files = functools.partial(_file, root, np.array(names), np.array(labels, np.int32), crop)
    return Split(len(labels), files)


def _entries(path: Path) -> list[os.DirEntry]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise ValueError(f"data: {path} cannot be listed ({error.strerror}).") from error


def _file(root, names, labels, crop, index, rng):
    path = os.path.join(root, os.fsdecode(names[index]))
    return read_image(path, crop, rng), labels[index]


def _digit(padded, labels, index, rng):
    top, left = (1, 1) if rng is None else rng.integers(0, 3, 2)  # a shift by up to one pixel
    return padded[index, top : top + 8, left : left + 8], labels[index]


def _synthetic(images, num_classes, index, rng):
    return images[index % len(images)], np.int32(index % num_classes)
