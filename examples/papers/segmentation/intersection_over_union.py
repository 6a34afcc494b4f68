"""Mean intersection over union, the usual score of semantic segmentation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def counts(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Counts the correct, the predicted and the labelled pixels of each class.

    The pixels are counted as integers, because a float32 sum of ones stops at 2^24 pixels, which is
    eight images of Cityscapes. Larger counts are rounded to 24 bits once.

    Args:
        logits: Array of shape (batch, height, width, classes).
        labels: Integers of shape (batch, height, width). Pixels with -1 are not counted.

    Returns:
        A float32 array of shape (3, classes), to be summed over batches.
    """
    classes = jnp.arange(logits.shape[-1])
    labelled = labels[..., None] == classes
    predicted = (logits.argmax(axis=-1)[..., None] == classes) & (labels >= 0)[..., None]
    pixels = [labelled & predicted, predicted, labelled]
    return jnp.stack([x.sum(axis=(0, 1, 2)) for x in pixels]).astype(jnp.float32)


def score(counts: np.ndarray) -> dict[str, float]:
    """``test_iou``, the mean over classes of ``right / (predicted + labelled - right)``.

    Classes that are neither labelled nor predicted anywhere are left out, as in the evaluation of
    Cityscapes. ``test_pixel_accuracy`` is the fraction of correct pixels.

    Args:
        counts: Sum of the results of :func:`counts`.

    Raises:
        ValueError: If no pixel has a label.
    """
    right, predicted, labelled = counts
    if labelled.sum() == 0:
        raise ValueError("counts: no pixel of the test images has a label; check the label files.")
    union = predicted + labelled - right
    iou = right[union > 0] / union[union > 0]
    return {
        "test_iou": float(iou.mean()),
        "test_pixel_accuracy": float(right.sum() / labelled.sum()),
    }
