"""Reads one image file, and crops and resizes it."""

from __future__ import annotations

import dataclasses

import numpy as np
from PIL import Image

AUGMENTS = ("random_resized_crop", "random_crop")
RATIO = 4 / 3  # largest ratio of the sides of a resized crop
TRIES = 10  # attempts to find a resized crop that fits into the image
EVALUATED = 7 / 8  # of the shorter side; 224 of 256 pixels are usual for ImageNet


@dataclasses.dataclass(frozen=True)
class Crop:
    """How to make an image ``size`` pixels high and wide.

    ``random_resized_crop`` (Szegedy et al. 2015) resizes a random part of the image. An evaluation
    uses the central square with 7/8 of the shorter side. ``random_crop`` does not scale and is for
    small images. An evaluation uses the center. Both mirror the image with probability 1/2 in
    training.

    Attributes:
        augment: ``"random_resized_crop"`` or ``"random_crop"``.
        size: Height and width in pixels.
        padding: Number of black pixels that ``random_crop`` adds on each side of the image.
        min_area: Smallest fraction of the image's area that ``random_resized_crop`` takes.
    """

    augment: str
    size: int
    padding: int = 0
    min_area: float = 0.08

    def __post_init__(self):
        if self.augment not in AUGMENTS:
            raise ValueError(f"augment must be {' or '.join(AUGMENTS)}, got {self.augment!r}.")
        if self.size < 1:
            raise ValueError(f"image_size must be at least 1 pixel, got {self.size}.")
        if self.padding < 0:
            raise ValueError(f"padding must be at least 0 pixels, got {self.padding}.")
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area must be above 0 and at most 1, got {self.min_area}.")


def read_image(path: str, crop: Crop, rng: np.random.Generator | None) -> np.ndarray:
    """Reads and crops an image.

    Args:
        path: Path of a JPEG or PNG file of any mode.
        crop: The kind of crop.
        rng: Generator for position and mirroring, or None for the crop of an evaluation.

    Returns:
        A uint8 array of shape (size, size, 3).

    Raises:
        ValueError: If the file cannot be read or is too small. The message has the path.
    """
    try:
        with Image.open(path) as file:
            if crop.augment == "random_resized_crop":
                image = _resized_crop(file, crop, rng)
            else:
                image = _crop(file, crop, rng)
    except Exception as error:  # decoders raise many kinds of errors, without the path
        raise ValueError(
            f"data: {path} cannot be used ({type(error).__name__}: {error}); repair or remove it."
        ) from error
    pixels = np.asarray(image)
    return pixels[:, ::-1] if rng is not None and rng.random() < 0.5 else pixels


def _resized_crop(file: Image.Image, crop: Crop, rng: np.random.Generator | None) -> Image.Image:
    width, height = file.size
    if rng is None:
        w = h = min(width, height) * EVALUATED
        left, top = (width - w) / 2, (height - h) / 2
    else:
        w, h = _random_size(width, height, crop.min_area, rng)
        left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
    box = left, top, min(left + w, width), min(top + h, height)
    # JPEG decoders can halve the resolution cheaply while the crop keeps enough pixels.
    shrink = max(1, int(min(w, h) / crop.size))
    drafted = file.draft("RGB", (-(-width // shrink), -(-height // shrink)))
    scale = drafted[1][2] / width if drafted else 1.0
    box = tuple(scale * x for x in box)
    return _rgb(file).resize((crop.size, crop.size), Image.Resampling.BILINEAR, box)


def _random_size(
    width: int, height: int, min_area: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Width and height of a random part of an image, a square if no attempt fits."""
    for _ in range(TRIES):
        area = rng.uniform(min_area, 1) * width * height
        ratio = RATIO ** rng.uniform(-1, 1)
        w, h = (area * ratio) ** 0.5, (area / ratio) ** 0.5
        if w <= width and h <= height:
            return w, h
    return min(width, height), min(width, height)


def _crop(file: Image.Image, crop: Crop, rng: np.random.Generator | None) -> Image.Image:
    width, height = file.size
    spare_width = width + 2 * crop.padding - crop.size
    spare_height = height + 2 * crop.padding - crop.size
    if min(spare_width, spare_height) < 0:
        raise ValueError(
            f"{width} x {height} pixels with a padding of {crop.padding} are less than an "
            f"image_size of {crop.size}"
        )
    if rng is None:
        left, top = spare_width // 2, spare_height // 2
    else:
        left, top = int(rng.integers(spare_width + 1)), int(rng.integers(spare_height + 1))
    left, top = left - crop.padding, top - crop.padding
    # Pillow fills the area outside the image with 0.
    return _rgb(file).crop((left, top, left + crop.size, top + crop.size))


def _rgb(file: Image.Image) -> Image.Image:
    if file.mode.startswith("I"):  # 16 bits, which Pillow would clip to 8
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    return file.convert("RGB")
