"""Divides the images among the processes, and loads batches ahead of time.

Processes do not communicate about data. Each one computes the same permutation of an epoch from
(seed, epoch) and takes its own part. So all processes take the same number of steps, and no two
processes take the same image.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

import grain
import numpy as np
from absl import flags
from data import Batch, Split
from image_folders import epoch_batches, steps_per_epoch

MAX_THREADS = 16
WORKER_THREADS = 2  # per worker process, so that one reads while the other decodes


def train_indices(
    num_images: int,
    part: int,
    num_parts: int,
    batch_size: int,
    seed: int,
    epoch: int,
    own_parts: bool = False,
) -> np.ndarray:
    """The indices of one process's images in one epoch, of shape (steps, batch_size).

    Images that do not fill a batch on every process are left out. They differ in every epoch. With
    ``own_parts``, see :class:`data.Split`, a process takes indices of its own range only.
    """
    if own_parts:
        steps, size = steps_per_epoch(num_images, num_parts, batch_size), num_images // num_parts
        order = part * size + np.random.default_rng((seed, epoch, part)).permutation(size)
        return order[: steps * batch_size].reshape(steps, batch_size)
    return epoch_batches(num_images, num_parts, batch_size, seed, epoch)[:, part]


def test_indices(num_images: int, part: int, num_parts: int, batch_size: int) -> np.ndarray:
    """The positions of the images that one process tests, an array of shape (steps, batch_size).

    The last batch is filled up with -1, which stands for no image.
    """
    steps = -(-num_images // (num_parts * batch_size))
    order = np.full(steps * num_parts * batch_size, -1)
    order[:num_images] = np.arange(num_images)
    return order.reshape(steps, num_parts, batch_size)[:, part]


def train_batches(
    split: Split,
    part: int,
    num_parts: int,
    batch_size: int,
    epochs: int,
    seed: int,
    start: int = 0,
    workers: int = 0,
) -> Iterator[Batch]:
    """The batches of a whole training.

    Args:
        split: The images.
        part: Index of this process.
        num_parts: Number of processes.
        batch_size: Images of this process in one step.
        epochs: Number of passes over the images.
        seed: Seed of order and augmentation, which depend only on the seed and the step.
        start: Number of steps to skip.
        workers: Number of worker processes that load images. 0 loads with threads.

    Returns:
        Images and labels of the steps ``start`` to ``epochs * steps_per_epoch - 1``.

    Raises:
        ValueError: If there are too few images for one step. The iterator raises it if an image
            cannot be read.
    """
    items = _TrainingItems(split, part, num_parts, batch_size, epochs, seed)
    load = functools.partial(_load_train, split.load, seed)
    return _batches(items, load, batch_size, workers, start)


def test_batches(
    split: Split,
    part: int,
    num_parts: int,
    batch_size: int,
    workers: int = 0,  # noqa: PT028
) -> Iterator[Batch]:
    """One process's part of all images. Labels of -1 mark images that only fill the last batch.

    Arguments and errors are those of :func:`train_batches`.
    """
    indices = test_indices(split.size, part, num_parts, batch_size).ravel()
    return _batches(indices, functools.partial(_load_test, split.load), batch_size, workers)


class _TrainingItems:
    """The source for grain: (epoch, image index) for each position in a training."""

    def __init__(self, split, part, num_parts, batch_size, epochs, seed):
        self.arguments = split.size, part, num_parts, batch_size, seed
        self.own_parts = split.own_parts
        self.per_epoch = steps_per_epoch(split.size, num_parts, batch_size) * batch_size
        self.epochs = epochs

    def __len__(self):
        return self.epochs * self.per_epoch

    def __getitem__(self, position):
        epoch, position = divmod(position, self.per_epoch)
        return epoch, _flat_train_indices(*self.arguments, epoch, self.own_parts)[position]


@functools.lru_cache(maxsize=2)  # threads may load two consecutive epochs at the same time
def _flat_train_indices(*arguments) -> np.ndarray:
    return train_indices(*arguments).ravel()


def _load_train(load, seed, item):
    epoch, index = map(int, item)
    return load(index, np.random.default_rng((seed, epoch, index)))


def _load_test(load, index):
    image, label = load(max(int(index), 0), None)
    return image, label if index >= 0 else np.full_like(label, -1)


def _batches(
    items: Sequence, load: Callable, batch_size: int, workers: int, start: int = 0
) -> Iterator[Batch]:
    threads = WORKER_THREADS if workers else min(MAX_THREADS, _num_cores())
    # Each thread makes whole batches. If workers divided the images before batching, the batches
    # would depend on the number of workers.
    batches = (
        grain.MapDataset.source(items)
        .map(load)
        .batch(batch_size)[start:]
        .to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads))
    )
    if workers:
        flags.FLAGS.mark_as_parsed()  # grain uses absl flags, which only absl.app parses
        options = grain.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(options, worker_init_fn=_end_with_parent)
    return iter(batches)


def _end_with_parent(worker: int, num_workers: int) -> None:
    """Lets a worker ignore signals, which its parent handles, and end when its parent ends."""
    del worker, num_workers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # the cores that Slurm gave to this process
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
