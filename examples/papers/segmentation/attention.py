"""Hierarchical multi-scale attention (Tao, Sapra, Catanzaro 2020, arXiv:2005.10821).

One network processes an image in several sizes. The small image shows the context, and the large
one shows the details. An attention map, which the network computes from the small image, weights
the two predictions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from segmentation import region_mutual_information
from segmentation.hrnet import ConvNorm, HRNet, resize
from segmentation.object_context import ObjectContext

TRAIN_SCALES = (0.5, 1.0)
AUXILIARY_WEIGHT = 0.4


class Prediction(NamedTuple):
    """Logits of the main and of the auxiliary head, float32 (batch, height, width, classes)."""

    logits: jax.Array
    auxiliary: jax.Array


def loss(prediction: Prediction, labels: jax.Array) -> jax.Array:
    """Region mutual information plus 0.4 times the cross-entropy of the auxiliary head."""
    auxiliary = region_mutual_information.cross_entropy(prediction.auxiliary, labels)
    return region_mutual_information.loss(prediction.logits, labels) + AUXILIARY_WEIGHT * auxiliary


def fuse(
    coarse: jax.Array, attention: jax.Array, fine: jax.Array, shape: tuple[int, int]
) -> jax.Array:
    """``U(α l_coarse) + (1 - U(α)) U(l_fine)``, Eq. 1, where U interpolates to a shape."""
    kept = 1 - resize(attention, shape)
    return resize(attention * coarse, shape) + kept * resize(fine, shape)


class MultiScaleAttention(nnx.Module):
    """HRNet, object context, a segmentation head and an attention head, shared by all scales.

    The scales are fused at a quarter of the resolution, and the result is interpolated to the size
    of the images.

    Args:
        channels: Channels of the images.
        num_classes: Number of classes.
        rngs: Generators of the initial parameters.
        scales: Scales of an evaluation. They must contain 1. Training uses 0.5 and 1.
        widths: Channels of the branches of the HRNet.
        blocks: Residual blocks of the HRNet on a branch between two fusions.
        head_width: Channels of context and heads.
        dtype: Dtype of activations.

    Raises:
        ValueError: If 1 is not one of the scales.
    """

    def __init__(
        self,
        channels: int,
        num_classes: int,
        rngs: nnx.Rngs,
        scales: tuple[float, ...] = TRAIN_SCALES,
        widths: tuple[int, ...] = (32, 64),
        blocks: int = 1,
        head_width: int = 64,
        dtype: DTypeLike = jnp.float32,
    ):
        if 1.0 not in scales:
            raise ValueError(f"scales must contain 1, the size of the labels, got {scales}.")
        self.scales = tuple(sorted(scales, reverse=True))
        self.dtype = dtype
        self.backbone = HRNet(channels, widths, blocks, dtype, rngs)
        self.context = ObjectContext(sum(widths), head_width, num_classes, dtype, rngs)
        self.head = nnx.Conv(head_width, num_classes, (1, 1), dtype=dtype, rngs=rngs)
        self.attention = nnx.List(ConvNorm(head_width, head_width, 3, dtype, rngs) for _ in "12")
        self.attention_head = nnx.Conv(head_width, 1, (1, 1), dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool) -> Prediction:
        """Returns predictions for uint8 images of shape (batch, height, width, channels)."""
        height, width = images.shape[1:3]
        x = images.astype(jnp.float32) / 127.5 - 1
        fused = None
        for scale in sorted(TRAIN_SCALES, reverse=True) if train else self.scales:
            size = (round(scale * height), round(scale * width))
            coarse, attention = self.at_one_scale(resize(x, size).astype(self.dtype), train)
            if fused is None:
                fused = coarse
                continue
            # Sizes above that of the labels are reduced as they are fused, smaller ones enlarged.
            like = coarse if scale >= 1 else fused
            shape = like.logits.shape[1:3]
            pairs = zip(coarse, fused, strict=True)
            fused = Prediction(*(fuse(low, attention, high, shape) for low, high in pairs))
        return Prediction(*(resize(x, (height, width)) for x in fused))

    def at_one_scale(self, x: jax.Array, train: bool) -> tuple[Prediction, jax.Array]:
        """Returns float32 logits and attention at a quarter of the resolution."""
        features, auxiliary = self.context(self.backbone(x, train), train)
        attention = features
        for conv in self.attention:
            attention = conv(attention, train)
        prediction = Prediction(self.head(features), auxiliary)
        outputs = prediction, nnx.sigmoid(self.attention_head(attention))
        return jax.tree.map(lambda x: x.astype(jnp.float32), outputs)
