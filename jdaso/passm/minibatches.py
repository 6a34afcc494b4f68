"""The samples of every process: disjoint minibatches of one common permutation."""

from collections.abc import Sequence

import numpy as np

from jdaso.core.validation import check_whole


def minibatches(
    num_samples: int, batch_sizes: Sequence[int], epoch: int, seed: int = 0
) -> list[np.ndarray]:
    """The minibatches of one epoch for each process (passm Sec. 4).

    Processes need not communicate. Each computes the same permutation, a new one in every epoch,
    and takes its own part. Samples that do not fill a minibatch of all processes are left out.

    Args:
        num_samples: Number of samples in all.
        batch_sizes: Samples of a step of each process. A server's may be smaller than its slaves',
            such as 32 and 128 in passm Fig. 4.
        epoch: Epoch, counted from 0.
        seed: Seed of the permutations.

    Returns:
        For each process an int array of shape ``(steps, batch_size)`` of indices of samples.

    Raises:
        ValueError: If there are fewer samples than one step of all processes takes.

    >>> [part.shape for part in minibatches(100, batch_sizes=[8, 16], epoch=0)]
    [(4, 8), (4, 16)]
    """
    for size in batch_sizes:
        check_whole("batch_sizes", size, 1)
    together = sum(batch_sizes)
    steps = num_samples // together if together else 0
    if steps == 0:
        raise ValueError(
            f"the sum of batch_sizes must be between 1 and num_samples, {num_samples}, got "
            f"{together}; use fewer processes or smaller batches."
        )
    order = np.random.default_rng((seed, epoch)).permutation(num_samples)
    rows = order[: steps * together].reshape(steps, together)
    return np.split(rows, np.cumsum(batch_sizes)[:-1], axis=1)
