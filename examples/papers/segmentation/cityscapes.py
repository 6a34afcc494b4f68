"""Cityscapes (Cordts et al. 2016, arXiv:1604.01685) in the folders that its archives unpack to.

The labels of leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png are in
gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png. val/ has the same layout as train/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from data import Dataset, Split
from PIL import Image

IMAGE, LABELS = "_leftImg8bit.png", "_gtFine_labelIds.png"
#: The evaluated classes and their label ids. All other ids, 0 to 33 and 255, have no class.
CLASSES = {
    "road": 7,
    "sidewalk": 8,
    "building": 11,
    "wall": 12,
    "fence": 13,
    "pole": 17,
    "traffic light": 19,
    "traffic sign": 20,
    "vegetation": 21,
    "terrain": 22,
    "sky": 23,
    "person": 24,
    "rider": 25,
    "car": 26,
    "truck": 27,
    "bus": 28,
    "train": 31,
    "motorcycle": 32,
    "bicycle": 33,
}
SCALES = (0.5, 2.0)  # range of the random scale of training images
GREY = 127  # colour around an image that is smaller than the crop

_CLASS_OF_ID = np.full(256, -1, np.int32)
_CLASS_OF_ID[list(CLASSES.values())] = np.arange(len(CLASSES))


def cityscapes(root: Path, crop: tuple[int, int]) -> Dataset:
    """The data set with 19 classes: random crops of train/ for training, whole images of val/.

    Args:
        root: The folder of leftImg8bit/ and gtFine/.
        crop: Height and width of a training image in pixels, after the random scaling.

    Raises:
        ValueError: If an image or its labels are missing. The message has the path.
    """
    if min(crop) < 1:
        raise ValueError(f"crop must be at least 1 pixel high and wide, got {crop}.")
    train, test = _find(root, "train"), _find(root, "val")
    size = read(*test[0])[0].size
    splits = (Split(len(paths), Pictures(paths, crop, size[::-1])) for paths in (train, test))
    return Dataset(*splits, num_classes=len(CLASSES), channels=3)


@dataclass(frozen=True)
class Pictures:
    """Reads the image and the labels of an index.

    Attributes:
        paths: Paths of each image and its labels.
        crop: Height and width of a random crop, which is taken if there is an rng.
        size: Height and width that all images must have if there is no rng.
    """

    paths: list[tuple[str, str]]
    crop: tuple[int, int]
    size: tuple[int, int]

    def __call__(
        self, index: int, rng: np.random.Generator | None
    ) -> tuple[np.ndarray, np.ndarray]:
        image, ids = read(*self.paths[index])
        if rng is not None:
            pixels, ids = cut(image, ids, self.crop, rng)
        elif (image.height, image.width) == self.size:
            pixels, ids = np.asarray(image), np.asarray(ids)
        else:
            raise ValueError(
                f"data: {self.paths[index][0]} has {image.height} x {image.width} pixels, but "
                f"others have {self.size[0]} x {self.size[1]}; all test images must have one size."
            )
        return pixels, _CLASS_OF_ID[ids]


def read(image_path: str, labels_path: str) -> tuple[Image.Image, Image.Image]:
    """Reads an image as RGB and its label ids. Raises ValueError with the path if it cannot."""
    image, ids = _open(image_path).convert("RGB"), _open(labels_path)
    if ids.mode != "L":
        raise ValueError(f"data: {labels_path} needs ids of 8 bits, got mode {ids.mode!r}.")
    if ids.size != image.size:
        raise ValueError(
            f"data: {labels_path} has {ids.height} x {ids.width} labels, but its image has "
            f"{image.height} x {image.width} pixels; check that they belong together."
        )
    return image, ids


def cut(
    image: Image.Image, ids: Image.Image, crop: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A random crop of the scaled and possibly mirrored image. Missing areas are grey, no label."""
    scale = rng.uniform(*SCALES)
    size = np.array((image.height, image.width))
    visible = np.maximum(np.minimum(crop, np.floor(scale * size)), 1).astype(int)
    start = rng.uniform(0, 1, 2) * (size - visible / scale).clip(0)
    top, left = start
    bottom, right = np.minimum(start + visible / scale, size)
    box, shape = (left, top, right, bottom), tuple(visible[::-1].tolist())
    pixels, labels = np.full((*crop, 3), GREY, np.uint8), np.zeros(crop, np.uint8)
    y, x = rng.integers(0, np.array(crop) - visible + 1)
    window = slice(y, y + visible[0]), slice(x, x + visible[1])
    pixels[window] = image.resize(shape, Image.Resampling.BILINEAR, box)
    labels[window] = ids.resize(shape, Image.Resampling.NEAREST, box)
    step = rng.choice((-1, 1))
    return pixels[:, ::step], labels[:, ::step]


def _find(root: Path, split: str) -> list[tuple[str, str]]:
    """The paths of all images and their labels."""
    images = sorted((root / "leftImg8bit" / split).glob("*/*" + IMAGE))
    if not images:
        raise ValueError(f"data: found no image {root}/leftImg8bit/{split}/*/*{IMAGE}.")
    pairs = []
    for image in images:
        name = image.name.removesuffix(IMAGE) + LABELS
        labels = root / "gtFine" / split / image.parent.name / name
        if not labels.is_file():
            raise ValueError(f"data: {image} needs its labels in {labels}, which does not exist.")
        pairs.append((str(image), str(labels)))
    return pairs


def _open(path: str) -> Image.Image:
    try:
        with Image.open(path) as file:
            file.load()
            return file
    except Exception as error:  # decoders raise many kinds of errors, without the path
        raise ValueError(
            f"data: {path} cannot be used ({type(error).__name__}: {error}); repair or remove it."
        ) from error
