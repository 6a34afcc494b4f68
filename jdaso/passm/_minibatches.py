"""Which samples every process takes: disjoint minibatches of one common permutation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jdaso._checks import check_whole


def minibatches(
    num_samples: int, batch_sizes: Sequence[int], epoch: int, seed: int = 0
) -> list[np.ndarray]:
    """The minibatches of one epoch for each process (passm Sec. 4).

    Processes never talk about data: each computes the same permutation, a new one in every epoch,
    and takes its own part. What does not fill a minibatch of all processes is left out.

    Args:
        num_samples: how many there are.
        batch_sizes: of each process; a server's may be smaller than that of its slaves.
        epoch: counted from 0.
        seed: of the permutations.

    Returns:
        For each process an int array of shape ``(steps, batch_size)``, indices of samples.

    Raises:
        ValueError: if there are fewer samples than one step of all processes takes.

    >>> [part.shape for part in minibatches(100, batch_sizes=[8, 16], epoch=0)]
    [(4, 8), (4, 16)]
    """
    for size in batch_sizes:
        check_whole("batch_sizes", size, 1)
    together = sum(batch_sizes)
    steps = num_samples // together if together else 0
    if steps == 0:
        raise ValueError(
            f"batch_sizes: {len(batch_sizes)} processes take {together} samples at a step, but "
            f"there are {num_samples} in all; choose fewer processes or smaller batches."
        )
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    rows = order[: steps * together].reshape(steps, together)
    return np.split(rows, np.cumsum(batch_sizes)[:-1], axis=1)
