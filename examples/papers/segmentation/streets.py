"""Generated pictures of streets: a data set for segmentation that needs no download.

A camera looks along a road between houses. Cars, people and trees stand on the road and beside it
in perspective, under changing light. Houses, cars and clothes have random colours, and asphalt has
the colour of paving stones. So a class shows in shape and surroundings more than in colour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from data import Dataset, Split

CLASSES = ("road", "sidewalk", "building", "vegetation", "sky", "person", "car")
ROAD, SIDEWALK, BUILDING, VEGETATION, SKY, PERSON, CAR = range(len(CLASSES))
NO_LABEL = -1
DRAWN = 1  # end of the seed of a picture, to differ from the seed of its augmentation
MIN_CROP = 0.7  # smallest fraction of height and width that a training crop takes

Picture = tuple[np.ndarray, np.ndarray]


def streets(
    height: int = 64, width: int = 128, num_train: int = 512, num_test: int = 128, seed: int = 0
) -> Dataset:
    """The data set with 7 classes. Pictures are drawn when they are loaded.

    Args:
        height: Height in pixels.
        width: Width in pixels.
        num_train: Number of training pictures.
        num_test: Number of test pictures.
        seed: Seed of the pictures.
    """
    train = Split(num_train, Streets(height, width, (seed, 0)))
    test = Split(num_test, Streets(height, width, (seed, 1)))
    return Dataset(train, test, num_classes=len(CLASSES), channels=3)


@dataclass(frozen=True)
class Streets:
    """Draws the picture of an index, and crops and mirrors it if there is an rng."""

    height: int
    width: int
    seed: tuple[int, ...]

    def __call__(self, index: int, rng: np.random.Generator | None) -> Picture:
        picture = draw(self.height, self.width, np.random.default_rng((*self.seed, index, DRAWN)))
        return picture if rng is None else augment(*picture, rng)


def augment(image: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Picture:
    """A random crop, enlarged to the old size by repeating pixels, and mirrored at random."""
    share = rng.uniform(MIN_CROP, 1)
    rows, columns = (
        (n * (rng.uniform(0, 1 - share) + share * np.arange(n) / n)).astype(int)
        for n in labels.shape
    )
    if rng.random() < 0.5:
        columns = columns[::-1]
    return image[rows[:, None], columns], labels[rows[:, None], columns]


def draw(height: int, width: int, rng: np.random.Generator) -> Picture:
    """Draws a uint8 image of shape (height, width, 3) and its int32 labels, -1 for no label."""
    street = Street(height, width, rng)
    objects = [street.car] * rng.integers(1, 5) + [street.person] * rng.integers(2, 7)
    objects += [street.tree] * rng.integers(1, 5)
    distances = np.sort(rng.uniform(0.15, 0.8, len(objects)))  # from far to near
    for draw_object, nearness in zip(rng.permutation(objects), distances, strict=True):
        draw_object(nearness)
    return street.photograph()


class Street:
    """Pixels and labels of a picture. Each object covers the objects painted before it."""

    def __init__(self, height: int, width: int, rng: np.random.Generator):
        self.height, self.width, self.rng = height, width, rng
        self.horizon = height * rng.uniform(0.3, 0.45)
        self.vanishing_point = width * rng.uniform(0.35, 0.65)
        self.middle = rng.uniform(-0.5, 0.5)  # center of the road, in units of the camera's height
        self.road = rng.uniform(0.9, 1.5)  # half the width of the road
        self.labels = np.full((height, width), SKY, np.int32)
        self.image = np.empty((height, width, 3), np.float32)
        y, x = np.ogrid[0.5:height, 0.5:width]
        self._sky_and_houses(y, x)
        self._ground(y, x)

    def car(self, nearness: float) -> None:
        side = self.middle + self.rng.uniform(-0.7, 0.7) * self.road
        colour, dark = self._colour(), self.rng.uniform(0, 0.2)
        self._paint(nearness, side, 0.0, 0.1, 1.6, dark, None)  # its shadow
        for wheel in (-0.5, 0.5):
            self._paint(nearness, side + wheel, 0.0, 0.3, 0.3, dark, CAR, is_round=True)
        self._paint(nearness, side, 0.1, 0.5, 1.6, colour, CAR)
        self._paint(nearness, side, 0.2, 0.8, 1.2, colour, CAR, is_round=True)
        self._paint(nearness, side, 0.6, 0.25, 0.8, dark, CAR)

    def person(self, nearness: float) -> None:
        side = self.middle + self.rng.uniform(-2, 2) * self.road
        skin = np.array((0.8, 0.6, 0.5)) * self.rng.uniform(0.4, 1.1)
        self._paint(nearness, side, 0.0, 0.6, 0.35, self._colour(), PERSON)
        self._paint(nearness, side, 0.5, 0.65, 0.55, self._colour(), PERSON, is_round=True)
        self._paint(nearness, side, 1.05, 0.3, 0.28, skin, PERSON, is_round=True)

    def tree(self, nearness: float) -> None:
        side = self.middle + self.rng.choice((-1, 1)) * self.rng.uniform(1.1, 2.2) * self.road
        leaves = self.rng.uniform((0.1, 0.2, 0.05), (0.5, 0.6, 0.2))
        self._paint(nearness, side, 0.0, 1.5, 0.15, (0.3, 0.22, 0.15), VEGETATION)
        for _ in range(3):
            up, aside = self.rng.uniform((1.0, -0.5), (1.8, 0.5))
            shade = leaves * self.rng.uniform(0.7, 1.2)
            self._paint(nearness, side + aside, up, 1.3, 1.3, shade, VEGETATION, is_round=True)

    def photograph(self) -> Picture:
        """Adds light, noise, the bonnet of the camera's car, and borders without label."""
        rng, shape = self.rng, self.labels.shape
        patches = rng.uniform(0.4, 0.6, (-(-shape[0] // 8), -(-shape[1] // 8), 1))
        patches = (patches * rng.uniform(1, 2) * rng.uniform(0.9, 1.1, 3)).astype(np.float32)
        image = self.image * patches.repeat(8, axis=0).repeat(8, axis=1)[: shape[0], : shape[1]]
        image += rng.uniform(0.02, 0.1) * (rng.random(image.shape, np.float32) - 0.5)
        y, x = np.ogrid[-1 : 0 : shape[0] * 1j, -1 : 1 : shape[1] * 1j]
        bonnet = (y / 0.1) ** 2 + (x / 0.6) ** 2 < 1
        image[bonnet] = rng.uniform(0.1, 0.4)
        labels = self.labels.copy()
        labels[bonnet] = NO_LABEL
        # As in Cityscapes, pixels of a border belong to no class.
        labels[:-1][self.labels[:-1] != self.labels[1:]] = NO_LABEL
        labels[:, :-1][self.labels[:, :-1] != self.labels[:, 1:]] = NO_LABEL
        return (255 * np.clip(image, 0, 1, out=image)).astype(np.uint8), labels

    def _sky_and_houses(self, y: np.ndarray, x: np.ndarray) -> None:
        rng = self.rng
        clouds = rng.uniform(0.4, 1.0) * np.array((1.0, 1.0, rng.uniform(1.0, 1.3)))
        self.image[:] = clouds * (1 - rng.uniform(0, 0.5) * y[..., None] / self.height)
        corners = np.sort(rng.uniform(0, self.width, rng.integers(4, 9)))
        house = np.searchsorted(corners, x[0])  # of each column
        colours = np.stack([self._colour() for _ in range(len(corners) + 1)])
        slope, eaves = rng.uniform((0.0, -0.03), (1.2, 0.1), (len(colours), 2)).T
        roof = self.horizon - eaves[house] * self.height
        roof = roof - slope[house] * abs(x - self.vanishing_point)
        floor, window = rng.uniform(0.06, 0.16, (2, len(colours))) * self.height
        glass = ((y / floor[house]) % 1 < 0.5) & ((x / window[house]) % 1 < 0.5)
        shade = np.where(glass, np.float32(rng.uniform(0.3, 1.0)), np.float32(1))
        built = y > roof
        self.labels[built] = BUILDING
        np.copyto(
            self.image, shade[..., None] * colours[house].astype(np.float32), where=built[..., None]
        )

    def _ground(self, y: np.ndarray, x: np.ndarray) -> None:
        rng = self.rng
        below = np.maximum(y - self.horizon, 1e-3)
        aside = abs((x - self.vanishing_point) / below - self.middle)
        paving = (aside < self.road * rng.uniform(1.3, 2.2)) & (y > self.horizon)
        asphalt = (aside < self.road) & (y > self.horizon)
        dashes = (rng.uniform(2, 5) * self.height / below + rng.random()) % 4 < 2
        marks = asphalt & ((aside < 0.05) & dashes | (abs(aside - 0.9 * self.road) < 0.04))
        self.labels[paving], self.labels[asphalt] = SIDEWALK, ROAD
        self.image[paving] = rng.uniform(0.3, 0.6) * rng.uniform(0.9, 1.1, 3)
        self.image[asphalt] = rng.uniform(0.2, 0.5) * rng.uniform(0.9, 1.1, 3)
        self.image[marks] = rng.uniform(0.6, 1.0)

    def _colour(self) -> np.ndarray:
        """A random colour, mostly a pale one."""
        return self.rng.uniform(0.1, 0.9) + self.rng.uniform(0, 0.5) * self.rng.uniform(-1, 1, 3)

    def _paint(
        self,
        nearness: float,
        side: float,
        up: float,
        height: float,
        width: float,
        colour: Any,
        label: int | None,
        is_round: bool = False,
    ) -> None:
        """Paints a rectangle or the ellipse in it. Lengths are in units of the camera's height."""
        unit = nearness * (self.height - self.horizon)
        y, x = self.horizon + (1 - up - height / 2) * unit, self.vanishing_point + side * unit
        height, width = height * unit / 2, width * unit / 2
        top, bottom = max(round(y - height), 0), min(round(y + height), self.height)
        left, right = max(round(x - width), 0), min(round(x + width), self.width)
        if top >= bottom or left >= right:
            return
        inside = True
        if is_round:
            v = (np.arange(top, bottom) + 0.5 - y) / height
            u = (np.arange(left, right) + 0.5 - x) / width
            inside = (v**2)[:, None] + u**2 < 1
        window = slice(top, bottom), slice(left, right)
        self.image[window][inside] = colour
        if label is not None:
            self.labels[window][inside] = label
