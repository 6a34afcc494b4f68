"""Every image once, on one process, and the same number of steps everywhere."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import data

SIZES = [(100, 2, 8), (101, 3, 5), (16, 1, 16), (1437, 4, 32), (97, 5, 7)]


@pytest.fixture
def images(tmp_path):
    """Folders as ImageNet has them: two classes, 3 + 4 images for training, 1 + 2 for testing."""
    rng = np.random.default_rng(0)
    for side, counts in (("train", (3, 4)), ("val", (1, 2))):
        for name, count in zip(("cat", "dog"), counts, strict=True):
            (tmp_path / side / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / side / name / f"{i}.JPEG")
    return tmp_path


@pytest.mark.parametrize(("num_images", "num_parts", "batch_size"), SIZES)
def test_training_parts_are_disjoint_and_take_equal_steps(num_images, num_parts, batch_size):
    parts = [
        data.train_indices(num_images, part, num_parts, batch_size, seed=3, epoch=1)
        for part in range(num_parts)
    ]
    steps = num_images // (num_parts * batch_size)
    assert [part.shape for part in parts] == [(steps, batch_size)] * num_parts
    seen = np.concatenate(parts, axis=None)
    assert len(np.unique(seen)) == len(seen)
    assert seen.min() >= 0
    assert seen.max() < num_images


def test_order_depends_on_seed_and_epoch_alone():
    first = data.train_indices(100, 0, 2, 8, seed=0, epoch=0)
    np.testing.assert_array_equal(first, data.train_indices(100, 0, 2, 8, seed=0, epoch=0))
    for seed, epoch in ((0, 1), (1, 0)):
        assert not np.array_equal(first, data.train_indices(100, 0, 2, 8, seed=seed, epoch=epoch))


def test_a_step_sees_the_same_images_whatever_the_number_of_parts():
    alone = data.train_indices(100, 0, 1, 16, seed=0, epoch=0)
    parts = [data.train_indices(100, part, 4, 4, seed=0, epoch=0) for part in range(4)]
    np.testing.assert_array_equal(alone, np.concatenate(parts, axis=1))


def test_batch_that_is_too_large_says_so():
    with pytest.raises(ValueError, match="lower --batch-size"):
        data.train_indices(10, 0, 2, 8, seed=0, epoch=0)


@pytest.mark.parametrize(("num_images", "num_parts", "batch_size"), [*SIZES, (3, 4, 8)])
def test_evaluation_sees_every_image_once(num_images, num_parts, batch_size):
    parts = [data.test_indices(num_images, i, num_parts, batch_size) for i in range(num_parts)]
    assert len({part.shape for part in parts}) == 1
    seen = np.concatenate(parts, axis=None)
    assert sorted(seen[seen >= 0]) == list(range(num_images))


def test_digits_have_a_fixed_stratified_test_split():
    dataset = data.digits()
    assert len(dataset.train.labels) == 1437
    assert np.bincount(dataset.test.labels).min() >= 34
    batches = list(data.test_batches(dataset.test, part=1, num_parts=2, batch_size=64))
    labels = np.concatenate([labels for _, labels in batches])
    assert batches[0][0].shape == (64, 8, 8, 1)
    assert np.sum(labels == -1) == 2 * 3 * 64 - 360  # the last part of the last step is padded


def test_training_images_are_augmented_alike_in_every_run():
    train = data.digits().train
    first, again = (next(data.train_batches(train, 0, 2, 16, seed=1, epoch=2)) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    indices = data.train_indices(len(train.labels), 0, 2, 16, seed=1, epoch=2)[0]
    plain = np.stack([train.load(i, None) for i in indices])
    assert not np.array_equal(first[0], plain)
    np.testing.assert_array_equal(first[1], train.labels[indices])


def test_folders_are_read(images):
    dataset = data.load(str(images), image_size=16)
    assert dataset.train.labels.tolist() == [0] * 3 + [1] * 4
    assert dataset.test.labels.tolist() == [0, 1, 1]
    for split, rng in ((dataset.train, np.random.default_rng(0)), (dataset.test, None)):
        for index in range(len(split.labels)):
            image = split.load(index, rng)
            assert image.shape == (16, 16, 3)
            assert image.dtype == np.uint8


@pytest.mark.parametrize("damage", [b"", b"no image", None])
def test_corrupt_image_is_named(images, damage):
    path = images / "train" / "dog" / "2.JPEG"
    path.write_bytes(path.read_bytes()[:200] if damage is None else damage)
    train = data.load(str(images), image_size=16).train
    with pytest.raises(ValueError, match=r"train/dog/2\.JPEG is not a readable image"):
        list(data.train_batches(train, 0, 1, 7, seed=0, epoch=0))


def test_class_on_one_side_only_is_named(images):
    (images / "train" / "emu").mkdir()
    with pytest.raises(ValueError, match="emu"):
        data.load(str(images), image_size=16)


def test_class_without_images_is_named(images):
    for side in ("train", "val"):
        (images / side / "emu").mkdir()
    with pytest.raises(ValueError, match="emu holds no image"):
        data.load(str(images), image_size=16)


def test_folder_without_test_images_is_named(images):
    for path in (images / "val").rglob("*.JPEG"):
        path.unlink()
    with pytest.raises(ValueError, match="val/cat holds no image"):
        data.load(str(images), image_size=16)
    with pytest.raises(ValueError, match="needs train/"):
        data.load(str(images / "train"), image_size=16)
