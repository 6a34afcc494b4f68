"""Every image is taken once by one process, in the same number of steps and in the same order."""

import functools
import os
import signal
import sys
from types import SimpleNamespace

import batches
import data
import numpy as np
import pytest
from launch import CHILDREN, mpiexec, passes, run
from PIL import Image

SIZES = [(100, 2, 8), (101, 3, 5), (16, 1, 16), (1437, 4, 32), (97, 5, 7)]


def number(index, rng):
    """An image of one pixel and a map of labels, which show the index and what rng has drawn."""
    drawn = 0 if rng is None else rng.integers(256)
    return np.full((1, 1, 1), drawn, np.uint8), np.full((2, 1), index, np.int32)


def numbers(size):
    return data.Split(size, number)


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for array, same in zip(batch, other, strict=True):
            np.testing.assert_array_equal(array, same)


@pytest.mark.parametrize(("num_images", "num_parts", "batch_size"), SIZES)
def test_training_parts_are_disjoint_and_take_equal_steps(num_images, num_parts, batch_size):
    parts = [
        batches.train_indices(num_images, part, num_parts, batch_size, seed=3, epoch=1)
        for part in range(num_parts)
    ]
    steps = num_images // (num_parts * batch_size)
    assert [part.shape for part in parts] == [(steps, batch_size)] * num_parts
    seen = np.concatenate(parts, axis=None)
    assert len(np.unique(seen)) == len(seen)
    assert seen.min() >= 0
    assert seen.max() < num_images


def test_order_depends_on_seed_and_epoch_alone():
    first = batches.train_indices(100, 0, 2, 8, seed=0, epoch=0)
    np.testing.assert_array_equal(first, batches.train_indices(100, 0, 2, 8, seed=0, epoch=0))
    for seed, epoch in ((0, 1), (1, 0)):
        other = batches.train_indices(100, 0, 2, 8, seed=seed, epoch=epoch)
        assert not np.array_equal(first, other)


def test_a_step_sees_the_same_images_whatever_the_number_of_parts():
    alone = batches.train_indices(100, 0, 1, 16, seed=0, epoch=0)
    parts = [batches.train_indices(100, part, 4, 4, seed=0, epoch=0) for part in range(4)]
    np.testing.assert_array_equal(alone, np.concatenate(parts, axis=1))


def test_batch_that_is_too_large_says_so():
    with pytest.raises(ValueError, match=r"batch_size must be at most 5, .* got 8"):
        batches.train_batches(numbers(10), 0, 2, 8, epochs=1, seed=0)


@pytest.mark.parametrize(("num_images", "num_parts", "batch_size"), [*SIZES, (3, 4, 8)])
def test_evaluation_sees_every_image_once(num_images, num_parts, batch_size):
    parts = [batches.test_indices(num_images, i, num_parts, batch_size) for i in range(num_parts)]
    assert len({part.shape for part in parts}) == 1
    seen = np.concatenate(parts, axis=None)
    assert sorted(seen[seen >= 0]) == list(range(num_images))


def test_training_goes_through_all_epochs():
    epochs, steps = 3, 100 // (2 * 8)
    seen = list(batches.train_batches(numbers(100), 1, 2, 8, epochs, seed=5))
    assert len(seen) == epochs * steps
    for epoch in range(epochs):
        indices = batches.train_indices(100, 1, 2, 8, seed=5, epoch=epoch)
        labels = np.stack([labels for _, labels in seen[epoch * steps : (epoch + 1) * steps]])
        np.testing.assert_array_equal(labels, np.tile(indices[..., None, None], (2, 1)))


def test_augmentation_depends_on_seed_epoch_and_image_alone():
    """Augmentation depends neither on the number of processes nor on the position in the epoch."""
    for part in range(2):
        seen = list(batches.train_batches(numbers(40), part, 2, 5, epochs=2, seed=7))
        for step, (images, labels) in enumerate(seen):
            for image, label in zip(images, labels, strict=True):
                rng = np.random.default_rng((7, step // 4, int(label[0, 0])))
                assert image == rng.integers(256)


@pytest.mark.parametrize("start", [0, 1, 5, 6, 17, 18])
def test_a_resumed_training_sees_what_it_would_have_seen(start):
    """18 steps in 3 epochs."""
    whole = list(batches.train_batches(numbers(100), 0, 2, 8, epochs=3, seed=0))
    assert len(whole) == 18
    resumed = batches.train_batches(numbers(100), 0, 2, 8, epochs=3, seed=0, start=start)
    assert_same(whole[start:], list(resumed))


@pytest.mark.parametrize(("num_images", "num_parts", "batch_size"), [(10, 2, 4), (3, 4, 2)])
def test_what_fills_test_batches_has_no_label(num_images, num_parts, batch_size):
    steps = -(-num_images // (num_parts * batch_size))
    seen = []
    for part in range(num_parts):
        parts = list(batches.test_batches(numbers(num_images), part, num_parts, batch_size))
        assert [images.shape for images, _ in parts] == [(batch_size, 1, 1, 1)] * steps
        assert {labels.dtype for _, labels in parts} == {np.dtype(np.int32)}
        seen += [label for _, labels in parts for label in labels]
    assert all(label.shape == (2, 1) and len(np.unique(label)) == 1 for label in seen)
    filling = steps * num_parts * batch_size - num_images
    assert sorted(label[0, 0] for label in seen) == [-1] * filling + list(range(num_images))


@pytest.fixture
def images(tmp_path):
    """Two classes of five images each, for training and for testing."""
    rng = np.random.default_rng(0)
    for side in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / side / name).mkdir(parents=True)
            for i in range(5):
                pixels = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / side / name / f"{i}.png")
    return tmp_path


def load(root):
    return data.load(
        SimpleNamespace(data=str(root), image_size=8, augment="random_crop", padding=1, min_area=1)
    )


def test_worker_processes_give_the_same_batches(images):
    """Two workers load ten steps. Their arrays stay valid while they are referenced."""
    batches_of = functools.partial(
        batches.train_batches, load(images).train, 0, 2, 2, epochs=5, seed=1
    )
    assert_same(list(batches_of()), list(batches_of(workers=2)))


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_image_is_named(images, workers):
    (images / "train" / "dog" / "2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"train/dog/2\.png cannot be used"):
        list(batches.train_batches(load(images).train, 0, 1, 10, 1, seed=0, workers=workers))


def test_workers_leave_mpi_and_signals_to_their_process():
    """Slurm may send signals to all processes of a job, but only the training handles them."""
    passes(mpiexec(2, "workers.py", "regular"))


def test_workers_end_with_a_process_that_was_killed():
    """A worker that outlived its parent would keep the output open, and the job would not end."""
    child = [sys.executable, str(CHILDREN / "workers.py"), "killed"]
    assert run(child, dict(os.environ), timeout=120).returncode == -signal.SIGKILL
