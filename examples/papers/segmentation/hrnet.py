"""A small high-resolution network (HRNetV2; Sun et al. 2019, arXiv:1904.04514) in flax.nnx.

Parallel branches have different resolutions and fuse their features every few blocks. HRNet-W48
has 66 million parameters: four branches with 48 to 384 channels, eight fusions, four residual
blocks on each branch between two fusions, and four blocks at full width before the first branching.
This network branches at once and has one fusion for each new branch.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import models
from flax import nnx
from jax.typing import DTypeLike


def resize(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Bilinear interpolation of (batch, height, width, channels) to another height and width."""
    # No antialiasing, as in PyTorch. Half the size is then the mean over 2x2 pixels.
    return jax.image.resize(x, (x.shape[0], *shape, x.shape[3]), "bilinear", antialias=False)


class ConvNorm(nnx.Module):
    """Convolution, BatchNorm, and ReLU if ``active``."""

    def __init__(
        self,
        features: int,
        out: int,
        size: int,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        stride: int = 1,
        active: bool = True,
    ):
        self.conv = models.conv(features, out, (size, size), strides=stride, dtype=dtype, rngs=rngs)
        self.norm = models.norm(out, dtype=dtype, rngs=rngs)
        self.active = active

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = self.norm(self.conv(x), use_running_average=not train)
        return nnx.relu(x) if self.active else x


class Path(nnx.Module):
    """Converts the features of one branch to another by strided convolutions or interpolation."""

    def __init__(
        self, widths: tuple[int, ...], source: int, target: int, dtype: DTypeLike, rngs: nnx.Rngs
    ):
        width, out, halvings = widths[source], widths[target], target - source
        if halvings <= 0:
            convs = [ConvNorm(width, out, 1, dtype, rngs, active=False)]
        else:
            convs = [ConvNorm(width, width, 3, dtype, rngs, stride=2) for _ in range(halvings - 1)]
            convs.append(ConvNorm(width, out, 3, dtype, rngs, stride=2, active=False))
        self.convs = nnx.List(convs)

    def __call__(self, x: jax.Array, shape: tuple[int, int], train: bool) -> jax.Array:
        for conv in self.convs:
            x = conv(x, train)
        return resize(x, shape)


class Stage(nnx.Module):
    """Residual blocks on each branch, then a fusion that adds all other branches."""

    def __init__(self, widths: tuple[int, ...], blocks: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.branches = nnx.List(
            nnx.List(models.BasicBlock(width, width, 1, dtype, rngs) for _ in range(blocks))
            for width in widths
        )
        branches = range(len(widths))
        self.paths = nnx.List(
            nnx.List(Path(widths, j, i, dtype, rngs) for j in branches if j != i) for i in branches
        )

    def __call__(self, xs: list[jax.Array], train: bool) -> list[jax.Array]:
        for i, blocks in enumerate(self.branches):
            for block in blocks:
                xs[i] = block(xs[i], train)
        fused = []
        for i, paths in enumerate(self.paths):
            others = xs[:i] + xs[i + 1 :]
            converted = [p(x, xs[i].shape[1:3], train) for p, x in zip(paths, others, strict=True)]
            fused.append(nnx.relu(sum(converted, xs[i])))
        return fused


class HRNet(nnx.Module):
    """Computes ``sum(widths)`` features at a quarter of the resolution.

    Args:
        channels: Channels of the images.
        widths: Channels of the branches. Each branch has half the resolution of the previous one.
        blocks: Residual blocks on a branch between two fusions.
        dtype: Dtype of activations.
        rngs: Generators of the initial parameters.
    """

    def __init__(
        self,
        channels: int,
        widths: tuple[int, ...],
        blocks: int,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.stem = ConvNorm(channels, widths[0], 3, dtype, rngs, stride=2)
        self.stem2 = ConvNorm(widths[0], widths[0], 3, dtype, rngs, stride=2)
        self.new_branches = nnx.List(
            ConvNorm(width, out, 3, dtype, rngs, stride=2)
            for width, out in itertools.pairwise(widths)
        )
        self.stages = nnx.List(
            Stage(widths[: i + 2], blocks, dtype, rngs) for i in range(len(widths) - 1)
        )

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        xs = [self.stem2(self.stem(x, train), train)]
        for new_branch, stage in zip(self.new_branches, self.stages, strict=True):
            xs = stage([*xs, new_branch(xs[-1], train)], train)
        return jnp.concatenate([resize(x, xs[0].shape[1:3]) for x in xs], axis=-1)
