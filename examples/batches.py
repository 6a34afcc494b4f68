"""Which images a process takes, in which order, and how they are loaded ahead of time.

Processes never talk about data. Each computes the same permutation of an epoch from (seed, epoch)
and takes its own part of it, so all take the same number of steps and share no image.
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

MAX_THREADS = 16
WORKER_THREADS = 2  # one reads while the other decodes


def steps_per_epoch(num_images: int, num_parts: int, batch_size: int) -> int:
    """Training steps of an epoch, the same in every process."""
    steps = num_images // (num_parts * batch_size)
    if steps == 0:
        raise ValueError(
            f"batch_size: {num_parts} processes take {batch_size} images each at a step, but "
            f"there are {num_images} in all; lower it."
        )
    return steps


def train_indices(
    num_images: int, part: int, num_parts: int, batch_size: int, seed: int, epoch: int
) -> np.ndarray:
    """Numbers of the images of one process in one epoch, of shape (steps, batch_size).

    The remainder that does not fill a batch everywhere is left out, another one in every epoch.
    """
    steps = steps_per_epoch(num_images, num_parts, batch_size)
    order = np.random.default_rng((seed, epoch)).permutation(num_images)
    return order[: steps * num_parts * batch_size].reshape(steps, num_parts, batch_size)[:, part]


def test_indices(num_images: int, part: int, num_parts: int, batch_size: int) -> np.ndarray:
    """The process's part of all images, of shape (steps, batch_size); -1 where none is left."""
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
    """Batches of a whole training.

    Args:
        split: the images.
        part: which of the processes this is.
        num_parts: processes.
        batch_size: images of this process at one step.
        epochs: times that the images are gone through.
        seed: of order and augmentation, which depend on nothing else but the step.
        start: steps that were taken before.
        workers: processes that load; 0: threads of this one.

    Returns:
        Images and labels of the steps ``start`` to ``epochs * steps_per_epoch - 1``.

    Raises:
        ValueError: if the images do not suffice for one step; from the iterator: if one of them
            cannot be read.
    """
    places = _TrainingPlaces(split.size, part, num_parts, batch_size, epochs, seed)
    load = functools.partial(_load_train, split.load, seed)
    return _batches(places, load, batch_size, workers, start)


def test_batches(
    split: Split,
    part: int,
    num_parts: int,
    batch_size: int,
    workers: int = 0,  # noqa: PT028
) -> Iterator[Batch]:
    """A process's part of all images, once; labels of -1 mark what only fills its last batches.

    Arguments and errors are those of :func:`train_batches`.
    """
    indices = test_indices(split.size, part, num_parts, batch_size).ravel()
    return _batches(indices, functools.partial(_load_test, split.load), batch_size, workers)


class _TrainingPlaces:
    """The (epoch, image) of a process at each place of a training; to grain, its data."""

    def __init__(self, num_images, part, num_parts, batch_size, epochs, seed):
        self.arguments = num_images, part, num_parts, batch_size, seed
        self.per_epoch = steps_per_epoch(num_images, num_parts, batch_size) * batch_size
        self.epochs = epochs

    def __len__(self):
        return self.epochs * self.per_epoch

    def __getitem__(self, place):
        epoch, place = divmod(place, self.per_epoch)
        return epoch, _flat_train_indices(*self.arguments, epoch)[place]


@functools.lru_cache(maxsize=2)  # where two epochs meet, threads are at work in both
def _flat_train_indices(*arguments) -> np.ndarray:
    return train_indices(*arguments).ravel()


def _load_train(load, seed, place):
    epoch, index = map(int, place)
    return load(index, np.random.default_rng((seed, epoch, index)))


def _load_test(load, index):
    image, label = load(max(int(index), 0), None)
    return image, label if index >= 0 else np.full_like(label, -1)


def _batches(
    places: Sequence, load: Callable, batch_size: int, workers: int, start: int = 0
) -> Iterator[Batch]:
    threads = WORKER_THREADS if workers else min(MAX_THREADS, _num_cores())
    # Each thread makes whole batches. If workers shared out the images before they are batched,
    # batches would depend on the number of workers.
    batches = (
        grain.MapDataset.source(places)
        .map(load)
        .batch(batch_size)[start:]
        .to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads))
    )
    if workers:
        flags.FLAGS.mark_as_parsed()  # grain asks for flags of its own, and only absl.app parses
        options = grain.MultiprocessingOptions(num_workers=workers)
        batches = batches.mp_prefetch(options, worker_init_fn=_live_as_long_as_parent)
    return iter(batches)


def _live_as_long_as_parent(worker: int, num_workers: int) -> None:
    """Signals to all processes of a job are the parent's to heed; without it a worker ends."""
    del worker, num_workers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)

    def watch():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # what Slurm gave to this process, not what the node has
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
