"""The data sets, and errors for folders with another layout."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import data
import numpy as np
import pytest
from PIL import Image


def load(name, **settings):
    defaults = {"image_size": 16, "augment": "random_resized_crop", "padding": 0, "min_area": 0.25}
    return data.load(SimpleNamespace(data=str(name), **defaults | settings))


def labels(split):
    return [int(split.load(index, None)[1]) for index in range(split.size)]


@pytest.fixture
def images(tmp_path):
    """Folders in ImageNet's layout: two classes, 3 + 4 training images, 1 + 2 test images."""
    rng = np.random.default_rng(0)
    for side, counts in (("train", (3, 4)), ("val", (1, 2))):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            (tmp_path / side / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / side / name / f"{i}.JPEG")
    return tmp_path


def test_digits_have_a_fixed_stratified_test_split():
    dataset = load("digits")
    assert (dataset.train.size, dataset.test.size) == (1437, 360)
    assert (dataset.num_classes, dataset.channels) == (10, 1)
    assert np.bincount(labels(dataset.test)).min() >= 34


def test_digits_are_shifted_by_up_to_one_pixel():
    train = load("digits").train
    plain, rng = train.load(3, None)[0], np.random.default_rng(0)
    padded = np.pad(plain, ((1, 1), (1, 1), (0, 0)))
    places = {padded[i : i + 8, j : j + 8].tobytes() for i in range(3) for j in range(3)}
    assert {train.load(3, rng)[0].tobytes() for _ in range(200)} == places
    assert plain.shape == (8, 8, 1)


def test_synthetic_images_have_the_shape_and_labels_asked_for():
    dataset = load("synthetic", synthetic_images=5000, num_classes=7, image_size=24)
    assert (dataset.train.size, dataset.test.size) == (5000, data.SYNTHETIC_TEST_IMAGES)
    assert (dataset.num_classes, dataset.channels) == (7, 3)
    (image, label), (other, _) = (dataset.train.load(i, None) for i in (4999, 4998))
    assert (image.shape, image.dtype, label.dtype) == ((24, 24, 3), np.uint8, np.int32)
    assert label == 4999 % 7
    assert not np.array_equal(image, other)


@pytest.mark.parametrize("setting", ["synthetic_images", "num_classes"])
def test_synthetic_images_without_images_are_an_error(setting):
    with pytest.raises(ValueError, match="must be at least 1"):
        load("synthetic", **{"synthetic_images": 9, "num_classes": 9, setting: 0})


def test_folders_are_read(images):
    dataset = load(images)
    assert labels(dataset.train) == [0] * 3 + [1] * 4
    assert labels(dataset.test) == [0, 1, 1]
    assert (dataset.num_classes, dataset.channels) == (2, 3)
    for split, rng in ((dataset.train, np.random.default_rng(0)), (dataset.test, None)):
        for index in range(split.size):
            image, label = split.load(index, rng)
            assert (image.shape, image.dtype, label.dtype) == ((16, 16, 3), np.uint8, np.int32)


def test_other_files_and_names_of_any_length_and_alphabet(images):
    dog = images / "train" / "dog"
    (dog / "notes.txt").write_text("no image")
    (dog / "0.JPEG").rename(dog / ("ü" * 60 + ".JPEG"))
    train = load(images).train
    assert labels(train) == [0] * 3 + [1] * 4


def test_settings_reach_the_crop(images):
    image, _ = load(images, image_size=18, augment="random_crop").test.load(0, None)
    with Image.open(images / "val" / "cat" / "0.JPEG") as file:
        np.testing.assert_array_equal(image, np.asarray(file)[1:19, 6:24])
    with pytest.raises(ValueError, match="min_area must be"):
        load(images, min_area=2)


@pytest.mark.parametrize("name", ["digits", "synthetic", "folder"])
def test_splits_can_be_sent_to_workers(images, name):
    dataset = load(images if name == "folder" else name, synthetic_images=9, num_classes=3)
    for split in (dataset.train, dataset.test):
        for original, copy in zip(
            split.load(1, np.random.default_rng(0)),
            pickle.loads(pickle.dumps(split)).load(1, np.random.default_rng(0)),
            strict=True,
        ):
            np.testing.assert_array_equal(original, copy)


def test_class_on_one_side_only_is_named(images):
    (images / "train" / "emu").mkdir()
    with pytest.raises(ValueError, match="emu"):
        load(images)


@pytest.mark.parametrize("side", ["train", "val"])
def test_class_without_images_is_named(images, side):
    for path in (images / side / "cat").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=f"{side}/cat has no image"):
        load(images)


def test_folder_without_classes_is_named(images):
    for path in (images / "val").rglob("*.JPEG"):
        path.rename(images / "val" / path.name)
    for name in ("cat", "dog"):
        (images / "val" / name).rmdir()
    with pytest.raises(ValueError, match="val has no subfolder; it needs one for each class"):
        load(images)


def test_missing_folders_are_named(images):
    with pytest.raises(ValueError, match=r"needs train/ .* found no .*cat/train"):
        load(images / "train" / "cat")
    (images / "val").rename(images / "validation")
    with pytest.raises(ValueError, match=r"found no .*test"):
        load(images)


def test_val_is_preferred_to_test(images):
    (images / "test").mkdir()
    assert load(images).test.size == 3
    (images / "test").rmdir()
    (images / "val").rename(images / "test")
    assert load(images).test.size == 3


@pytest.mark.parametrize("closed", ["train", "val/dog"])
def test_unreadable_folder_is_named(images, closed, monkeypatch):
    """The error is simulated, because root may read everything."""
    scandir = os.scandir

    def pretend(path):
        if Path(path) == images / closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", pretend)
    with pytest.raises(
        ValueError, match=rf"{images / closed} cannot be listed \(Permission denied"
    ):
        load(images)
