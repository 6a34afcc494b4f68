"""Crops of known images: position, size, and conversion of any mode to RGB."""

from pathlib import Path

import augment
import numpy as np
import pytest
from augment import Crop, read_image
from PIL import Image


@pytest.fixture
def save(tmp_path):
    """Writes pixels or an image into a file, lossless unless asked otherwise."""

    def save(image, name="image.png", **options):
        image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
        image.save(tmp_path / name, **options)
        return str(tmp_path / name)

    return save


def positions(height, width):
    """An image whose red value is the column and whose green value is the row."""
    rows, columns = np.indices((height, width))
    return np.stack([columns, rows, 0 * rows], axis=-1).astype(np.uint8)


def test_random_crop_is_a_part_of_the_padded_image(save):
    pixels = positions(12, 10) + 1  # 0 is the padding
    path = save(pixels)
    padded = np.pad(pixels, ((2, 2), (2, 2), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (8, 8), axis=(0, 1))
    windows = windows.transpose(0, 1, 3, 4, 2).reshape(-1, 8, 8, 3)
    allowed = {w.tobytes(): i for i, w in enumerate(windows)}
    allowed |= {w[:, ::-1].tobytes(): i + len(windows) for i, w in enumerate(windows)}
    rng = np.random.default_rng(0)
    seen = {read_image(path, Crop("random_crop", 8, padding=2), rng).tobytes() for _ in range(1000)}
    assert seen <= set(allowed)
    # There are (12 + 2 * 2 - 8 + 1) * (10 + 2 * 2 - 8 + 1) positions, plain and mirrored. Nearly
    # all of them occur.
    assert len(allowed) == 2 * 9 * 7
    assert len(seen) > 0.9 * len(allowed)


def test_middle_is_evaluated_at_its_own_scale(save):
    pixels = positions(12, 10)
    crop = read_image(save(pixels), Crop("random_crop", 8), None)
    np.testing.assert_array_equal(crop, pixels[2:10, 1:9])


def test_middle_seven_eighths_of_the_square_are_evaluated_resized(save):
    """The central crop of 64 x 32 pixels is rows 18 to 46 and columns 2 to 30, without resizing."""
    pixels = positions(64, 32)
    crop = read_image(save(pixels), Crop("random_resized_crop", 28), None)
    np.testing.assert_array_equal(crop, pixels[18:46, 2:30])


def test_resized_crops_have_the_area_and_ratio_asked_for(save):
    """The corners of a crop show its position, because the colours of the image are positions."""
    path = save(positions(200, 250))
    crop, rng = Crop("random_resized_crop", 50, min_area=0.25), np.random.default_rng(0)
    crops = np.stack([read_image(path, crop, rng) for _ in range(200)]).astype(float)
    left, right = crops[:, 25, 0, 0], crops[:, 25, -1, 0]
    widths = abs(right - left) * 50 / 49
    heights = (crops[:, -1, 25, 1] - crops[:, 0, 25, 1]) * 50 / 49
    areas, ratios = widths * heights / (200 * 250), widths / heights
    assert areas.min() > 0.25 * 0.95
    assert areas.max() < 1.0
    assert areas.std() > 0.5 * (1 - 0.25) / 12**0.5  # about that of a uniform distribution
    assert ratios.min() > 3 / 4 * 0.95
    assert ratios.max() < 4 / 3 * 1.05
    assert 60 < np.sum(right < left) < 140  # mirrored


def test_a_crop_fits_into_a_very_long_image(save):
    path = save(positions(4, 250))
    crop = Crop("random_resized_crop", 4, min_area=0.9)
    image = read_image(path, crop, np.random.default_rng(0)).astype(int)
    assert abs(image[0, -1, 0] - image[0, 0, 0]) == 3  # a square of it


@pytest.mark.parametrize("rng", [None, 0])
def test_large_jpeg_is_decoded_at_a_lower_resolution_of_the_same_place(save, rng, monkeypatch):
    path = save(positions(250, 250).repeat(8, axis=0).repeat(8, axis=1), "image.jpg", quality=95)
    crop = Crop("random_resized_crop", 32, min_area=0.5)
    decoded = []
    rgb = augment._rgb
    monkeypatch.setattr(augment, "_rgb", lambda file: decoded.append(file.size) or rgb(file))
    reduced = read_image(path, crop, rng if rng is None else np.random.default_rng(rng))
    assert decoded == [(250, 250)]
    monkeypatch.setattr("PIL.JpegImagePlugin.JpegImageFile.draft", lambda *args: None)
    full = read_image(path, crop, rng if rng is None else np.random.default_rng(rng))
    assert decoded[1:] == [(2000, 2000)]
    assert np.max(np.abs(reduced.astype(int) - full)) <= 4  # of 250


def test_same_rng_same_crop(save):
    path = save(positions(20, 30))
    for crop in (Crop("random_crop", 8, padding=1), Crop("random_resized_crop", 8)):
        first, again, other = (
            read_image(path, crop, np.random.default_rng(seed)) for seed in (0, 0, 1)
        )
        np.testing.assert_array_equal(first, again)
        assert not np.array_equal(first, other)


@pytest.mark.parametrize("name", augment.AUGMENTS)
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_any_mode_becomes_rgb(save, mode, name):
    """A grey of 100, or of 100 * 257 with 16 bits. White with one bit."""
    if mode == "I;16":
        image = Image.fromarray(np.full((9, 9), 100 * 257, np.uint16))
    else:
        grey = Image.new("L", (9, 9), 255 if mode == "1" else 100)
        image = grey.convert("RGB").convert(mode) if mode == "CMYK" else grey.convert(mode)
    path = save(image, "image.jpg" if mode == "CMYK" else "image.png")
    pixels = read_image(path, Crop(name, 8), None)
    assert pixels.shape == (8, 8, 3)
    assert pixels.dtype == np.uint8
    np.testing.assert_allclose(pixels.astype(int), 255 if mode == "1" else 100, atol=1)


@pytest.mark.parametrize("damage", [b"", b"no image", None])
@pytest.mark.parametrize("name", ["image.png", "image.jpg"])
def test_damaged_image_is_named(save, name, damage):
    path = save(np.random.default_rng(0).integers(0, 256, (20, 20, 3), np.uint8), name)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) // 2] if damage is None else damage)
    with pytest.raises(ValueError, match=rf"{path} cannot be used .*; repair or remove it"):
        read_image(path, Crop("random_crop", 8), None)


def test_missing_image_and_folder_in_its_place_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.png cannot be used \(FileNotFoundError"):
        read_image(str(tmp_path / "gone.png"), Crop("random_crop", 8), None)
    with pytest.raises(ValueError, match=r"cannot be used \(IsADirectoryError"):
        read_image(str(tmp_path), Crop("random_crop", 8), None)


@pytest.mark.parametrize("rng", [None, np.random.default_rng(0)])
def test_image_that_is_too_small_is_named(save, rng):
    path = save(positions(9, 7))
    assert read_image(path, Crop("random_crop", 9, padding=1), rng).shape == (9, 9, 3)
    with pytest.raises(ValueError, match=rf"{path} .*7 x 9 pixels .* image_size of 10"):
        read_image(path, Crop("random_crop", 10, padding=1), rng)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("augment", "flip"), ("size", 0), ("padding", -1), ("min_area", 0), ("min_area", 1.5)],
)
def test_setting_out_of_range_is_named(setting, value):
    settings = {"augment": "random_crop", "size": 8, setting: value}
    with pytest.raises(ValueError, match=f"{setting} must be .*, got {value!r}"):
        Crop(**settings)
