"""A small convolutional network that trains fast on a virtual cluster."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp


class Convolution(nn.Module):
    """A 3x3 convolution of stride 2, computed as shifted slices and one matrix product.

    On a virtual cluster each node has its own weights, and XLA turns ``lax.conv`` into grouped
    convolutions. On CPUs these take about twice as long as this implementation.
    """

    features: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        height, width, channels = images.shape[-3:]
        kernel = self.param(
            "kernel", nn.initializers.he_normal(), (9 * channels, self.features), jnp.float32
        )
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [
            padded[:, top : top + height : 2, left : left + width : 2]
            for top in range(3)
            for left in range(3)
        ]
        return jnp.concatenate(shifted, axis=-1) @ kernel + bias


class SmallCNN(nn.Module):
    """One convolution of stride 2 for each width, followed by a linear classifier.

    The network has no batch statistics, which would have to be averaged between nodes as well. It
    takes uint8 images of shape (batch, height, width, channels) and returns logits.

    >>> import jax, jax.numpy as jnp
    >>> images = jnp.zeros((2, 8, 8, 1), jnp.uint8)
    >>> logits, variables = SmallCNN().init_with_output(jax.random.key(0), images)
    >>> logits.shape, sum(x.size for x in jax.tree.leaves(variables))
    ((2, 10), 6090)
    """

    widths: Sequence[int] = (16, 32)
    num_classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images.astype(jnp.float32) / 127.5 - 1
        for width in self.widths:
            x = nn.relu(Convolution(width)(x))
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))
