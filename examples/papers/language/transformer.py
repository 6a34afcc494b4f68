"""A decoder-only transformer: RMSNorm, rotary positions, SwiGLU, and tied embeddings."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

ROTARY_BASE = 10_000.0
EMBEDDING_SCALE = 0.02  # standard deviation of the first embeddings


class Shape(NamedTuple):
    """The sizes of a transformer.

    Attributes:
        vocabulary: Number of different tokens.
        layers: Number of blocks.
        width: Length of the vectors between the blocks.
        heads: Attention heads. ``width / heads`` must be even, for the rotary positions.
        hidden: Length of the vectors inside the SwiGLU.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    hidden: int


class Transformer(nnx.Module):
    """Predicts the next token at every position.

    Args:
        shape: The sizes.
        rngs: Random numbers for the initial parameters.
        dtype: Dtype of the activations. Parameters and logits are float32.
        remat: Whether the backward pass computes the activations of each block again instead of
            keeping them.

    Raises:
        ValueError: If the heads do not divide the width into vectors of even length.
    """

    def __init__(self, shape: Shape, rngs: nnx.Rngs, dtype: Any = jnp.float32, remat: bool = False):
        if shape.width % (2 * shape.heads):
            raise ValueError(
                f"width must be a multiple of 2 * heads, got width={shape.width} and "
                f"heads={shape.heads}."
            )
        normal = nnx.initializers.normal(EMBEDDING_SCALE)
        options = {"dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(shape.vocabulary, shape.width, embedding_init=normal, **options)
        self.layers = nnx.List([Block(shape, **options) for _ in range(shape.layers)])
        self.norm = nnx.RMSNorm(shape.width, **options)
        self.remat = remat

    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        """Returns float32 logits (batch, time, vocabulary) for tokens (batch, time)."""
        x = self.embed(tokens.astype(jnp.int32))
        block = nnx.remat(Block.__call__) if self.remat and train else Block.__call__
        for layer in self.layers:
            x = block(layer, x)
        x = self.norm(x)
        table = self.embed.embedding[...].astype(x.dtype)
        # With activations of 16 bits, their products are summed in float32. Logits stay float32.
        return jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)


class Block(nnx.Module):
    """Attention and SwiGLU, each with a norm before it and a residual connection around it."""

    def __init__(self, shape: Shape, dtype: Any, rngs: nnx.Rngs):
        width, hidden = shape.width, shape.hidden
        norm = functools.partial(nnx.RMSNorm, width, dtype=dtype, rngs=rngs)
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=dtype, rngs=rngs)
        # Each of the 2 * layers sums gets a smaller part, so that x has the same size at any depth.
        small = nnx.initializers.variance_scaling(0.5 / shape.layers, "fan_in", "normal")
        self.heads = shape.heads
        self.norm_attention = norm()
        self.query_key_value = linear(width, 3 * width)
        self.attention_out = linear(width, width, kernel_init=small)
        self.norm_hidden = norm()
        self.gate_and_hidden = linear(width, 2 * hidden)
        self.hidden_out = linear(hidden, width, kernel_init=small)

    def __call__(self, x: jax.Array) -> jax.Array:
        projected = self.query_key_value(self.norm_attention(x))
        query, key, value = (
            y.reshape(*x.shape[:2], self.heads, -1) for y in jnp.split(projected, 3, axis=-1)
        )
        mixed = jax.nn.dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.attention_out(mixed.reshape(x.shape))
        gate, hidden = jnp.split(self.gate_and_hidden(self.norm_hidden(x)), 2, axis=-1)
        return x + self.hidden_out(nnx.silu(gate) * hidden)


def rotated(x: jax.Array) -> jax.Array:
    """Rotates pairs of numbers by angles proportional to the position (RoPE, arXiv:2104.09864).

    The scalar product of a query and a key then depends on their distance.

    Args:
        x: (batch, time, heads, length), with an even length.
    """
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    a, b = x[..., :half], x[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def strided_fragments(count: int) -> int | Callable[[Any], int]:
    """The argument ``fragments`` that gives layer i to fragment ``i mod count``.

    Each fragment so has layers of all depths, the strided order of Streaming DiLoCo. The embedding
    and the last norm belong to fragment 0.

    >>> strided_fragments(2)("['layers'][3]['norm_hidden']['scale']")
    1
    """
    if count == 1:
        return 1

    def fragment(path: Any) -> int:
        name = path if isinstance(path, str) else jax.tree_util.keystr(path)
        layer = re.search(r"'layers'\]\[(\d+)\]", name)
        return int(layer[1]) % count if layer else 0

    return fragment
