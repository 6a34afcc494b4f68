"""Cityscapes (Cordts et al. 2016, arXiv:1604.01685) in the folders that its archives unpack to.

leftImg8bit/train/aachen/aachen_000000_000019_leftImg8bit.png has its labels in
gtFine/train/aachen/aachen_000000_000019_gtFine_labelIds.png, and val/ is like train/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from data import Dataset, Split
from PIL import Image

IMAGE, LABELS = "_leftImg8bit.png", "_gtFine_labelIds.png"
#: The classes that count and their label ids; all other ids, 0 to 33 and 255, have no class.
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
SCALES = (0.5, 2.0)  # of training images
GREY = 127  # around an image that is smaller than the crop

_CLASS_OF_ID = np.full(256, -1, np.int32)
_CLASS_OF_ID[list(CLASSES.values())] = np.arange(len(CLASSES))


def cityscapes(root: Path, crop: tuple[int, int]) -> Dataset:
    """Random crops of train/ to train with, whole images of val/ to test; 19 classes.

    Args:
        root: the folder that holds leftImg8bit/ and gtFine/.
        crop: height and width in pixels, after the image was scaled.

    Raises:
        ValueError: naming the path where an image or its labels are missing.
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
        paths: of each image and its labels.
        crop: height and width of what is cut out at random if there is an rng.
        size: height and width that an image must have if there is none.
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
                f"data: {self.paths[index][0]} has {image.height} x {image.width} pixels, others "
                f"{self.size[0]} x {self.size[1]}; all images to test must have the same size."
            )
        return pixels, _CLASS_OF_ID[ids]


def read(image_path: str, labels_path: str) -> tuple[Image.Image, Image.Image]:
    """An image in RGB and its label ids, 8 bits each; raises ValueError naming the path."""
    image, ids = _open(image_path).convert("RGB"), _open(labels_path)
    if ids.mode != "L":
        raise ValueError(f"data: {labels_path} needs ids of 8 bits, got mode {ids.mode!r}.")
    if ids.size != image.size:
        raise ValueError(
            f"data: {labels_path} has {ids.height} x {ids.width} labels, but its image "
            f"{image.height} x {image.width} pixels; they belong to different images."
        )
    return image, ids


def cut(
    image: Image.Image, ids: Image.Image, crop: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A crop of the scaled image, perhaps mirrored; grey without label where it is too small."""
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


def _find(root: Path, side: str) -> list[tuple[str, str]]:
    """Paths of images and their labels."""
    images = sorted((root / "leftImg8bit" / side).glob("*/*" + IMAGE))
    if not images:
        raise ValueError(f"data: no image {root}/leftImg8bit/{side}/*/*{IMAGE}.")
    pairs = []
    for image in images:
        name = image.name.removesuffix(IMAGE) + LABELS
        labels = root / "gtFine" / side / image.parent.name / name
        if not labels.is_file():
            raise ValueError(f"data: {image} needs its labels in {labels}, which is not there.")
        pairs.append((str(image), str(labels)))
    return pairs


def _open(path: str) -> Image.Image:
    try:
        with Image.open(path) as file:
            file.load()
            return file
    except Exception as error:  # decoders raise errors of many kinds, none of which has the path
        raise ValueError(
            f"data: {path} cannot be used ({type(error).__name__}: {error}); mend or remove it."
        ) from error
