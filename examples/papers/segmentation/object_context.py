"""Object-contextual representations (OCR; Yuan, Chen, Wang 2020, arXiv:1909.11065)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from segmentation.hrnet import ConvNorm


class ObjectContext(nnx.Module):
    """Adds to the features of each pixel the context of the classes that the pixel resembles.

    An auxiliary head predicts the class of each pixel. The mean of the features, weighted with this
    prediction, represents the class, and the pixels attend to these means. Auxiliary head, queries,
    keys and values are linear here. The original has a convolution and BatchNorm before each.

    Args:
        features: Channels of the backbone.
        width: Channels of the output.
        num_classes: Number of classes.
        dtype: Dtype of activations.
        rngs: Generators of the initial parameters.
    """

    def __init__(
        self, features: int, width: int, num_classes: int, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        self.auxiliary = nnx.Linear(features, num_classes, dtype=dtype, rngs=rngs)
        self.pixels = ConvNorm(features, width, 3, dtype, rngs)
        self.query = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.key = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.value = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.merge = ConvNorm(2 * width, width, 1, dtype, rngs)

    def __call__(self, x: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        """Returns the features and the logits of the auxiliary head."""
        auxiliary, pixels = self.auxiliary(x), self.pixels(x, train)
        where = nnx.softmax(auxiliary, axis=(1, 2))
        classes = jnp.einsum("bhwc,bhwf->bcf", where, pixels)
        similarity = jnp.einsum("bhwf,bcf->bhwc", self.query(pixels), self.key(classes))
        attention = nnx.softmax(similarity / classes.shape[-1] ** 0.5)
        context = jnp.einsum("bhwc,bcf->bhwf", attention, self.value(classes))
        return self.merge(jnp.concatenate([context, pixels], axis=-1), train), auxiliary
