"""Mean intersection over union, the usual score of semantic segmentation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def counts(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Pixels of each class that are right, that were predicted, and that were labelled.

    Counted as integers: sums of ones in float32 would stop at 2^24 pixels, eight images of
    Cityscapes. Larger counts are rounded to 24 bits, once.

    Args:
        logits: of shape (batch, height, width, classes).
        labels: integers of shape (batch, height, width); what is -1 is not counted.

    Returns:
        float32 of shape (3, classes), to be summed over batches.
    """
    classes = jnp.arange(logits.shape[-1])
    labelled = labels[..., None] == classes
    predicted = (logits.argmax(axis=-1)[..., None] == classes) & (labels >= 0)[..., None]
    pixels = [labelled & predicted, predicted, labelled]
    return jnp.stack([x.sum(axis=(0, 1, 2)) for x in pixels]).astype(jnp.float32)


def score(counts: np.ndarray) -> dict[str, float]:
    """``test_iou``, the mean over classes of ``right / (predicted + labelled - right)``.

    Classes that are neither labelled nor predicted anywhere are left out, as by Cityscapes' own
    evaluation. ``test_pixel_accuracy`` is the share of pixels that are right.

    Args:
        counts: sums of :func:`counts`.

    Raises:
        ValueError: if no pixel has a label.
    """
    right, predicted, labelled = counts
    if labelled.sum() == 0:
        raise ValueError("counts: no pixel of the test images has a label; look at the labels.")
    union = predicted + labelled - right
    iou = right[union > 0] / union[union > 0]
    return {
        "test_iou": float(iou.mean()),
        "test_pixel_accuracy": float(right.sum() / labelled.sum()),
    }
