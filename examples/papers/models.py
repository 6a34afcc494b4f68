"""Residual networks (He et al. 2016) in flax.nnx: ResNet-18 to 101, and CIFAR's ResNet-20."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

# BatchNorm takes mean and variance over all devices of a process. Their axis is bound inside
# jdaso.local_value_and_grad. Between processes the statistics differ, as they differ between nodes
# in DASO.
LOCAL_AXIS = "local"

IMAGE_SIZE = {"resnet18": 224, "resnet34": 224, "resnet50": 224, "resnet101": 224, "resnet20": 32}

conv = functools.partial(
    nnx.Conv,
    use_bias=False,
    kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
)
norm = functools.partial(nnx.BatchNorm, momentum=0.9, axis_name=LOCAL_AXIS)
# With a last scale of 0 a block starts as the identity, which helps deep networks at first.
last_norm = functools.partial(norm, scale_init=nnx.initializers.zeros_init())


class Shortcut(nnx.Module):
    """The identity, or a projection if the block changes the shape."""

    def __init__(self, features: int, out: int, stride: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.project = stride != 1 or features != out
        if self.project:
            self.conv = conv(features, out, (1, 1), strides=stride, dtype=dtype, rngs=rngs)
            self.norm = norm(out, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return self.norm(self.conv(x), use_running_average=not train) if self.project else x


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, features: int, width: int, stride: int, dtype: DTypeLike, rngs: nnx.Rngs):
        self.conv1 = conv(features, width, (3, 3), strides=stride, dtype=dtype, rngs=rngs)
        self.norm1 = norm(width, dtype=dtype, rngs=rngs)
        self.conv2 = conv(width, width, (3, 3), dtype=dtype, rngs=rngs)
        self.norm2 = last_norm(width, dtype=dtype, rngs=rngs)
        self.shortcut = Shortcut(features, width, stride, dtype, rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = self.norm2(self.conv2(y), use_running_average=not train)
        return nnx.relu(y + self.shortcut(x, train))


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions. The 3x3 convolution has the stride (version 1.5)."""

    expansion = 4

    def __init__(self, features: int, width: int, stride: int, dtype: DTypeLike, rngs: nnx.Rngs):
        out = self.expansion * width
        self.conv1 = conv(features, width, (1, 1), dtype=dtype, rngs=rngs)
        self.norm1 = norm(width, dtype=dtype, rngs=rngs)
        self.conv2 = conv(width, width, (3, 3), strides=stride, dtype=dtype, rngs=rngs)
        self.norm2 = norm(width, dtype=dtype, rngs=rngs)
        self.conv3 = conv(width, out, (1, 1), dtype=dtype, rngs=rngs)
        self.norm3 = last_norm(out, dtype=dtype, rngs=rngs)
        self.shortcut = Shortcut(features, out, stride, dtype, rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = nnx.relu(self.norm2(self.conv2(y), use_running_average=not train))
        y = self.norm3(self.conv3(y), use_running_average=not train)
        return nnx.relu(y + self.shortcut(x, train))


# The block, the blocks of each stage, the width of the first stage, and whether the stem divides
# the resolution by four.
ARCHITECTURES = {
    "resnet18": (BasicBlock, (2, 2, 2, 2), 64, True),
    "resnet34": (BasicBlock, (3, 4, 6, 3), 64, True),
    "resnet50": (Bottleneck, (3, 4, 6, 3), 64, True),
    "resnet101": (Bottleneck, (3, 4, 23, 3), 64, True),
    "resnet20": (BasicBlock, (3, 3, 3), 16, False),
}


class ResNet(nnx.Module):
    """A stem, stages of blocks, the mean over all pixels, and a linear classifier.

    Each stage halves the resolution and doubles the width.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        stages: tuple[int, ...],
        width: int,
        large_stem: bool,
        channels: int,
        num_classes: int,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.dtype = dtype
        self.large_stem = large_stem
        kernel, stride = ((7, 7), 2) if large_stem else ((3, 3), 1)
        self.stem = conv(channels, width, kernel, strides=stride, dtype=dtype, rngs=rngs)
        self.stem_norm = norm(width, dtype=dtype, rngs=rngs)
        blocks, features = [], width
        for stage, depth in enumerate(stages):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(features, width * 2**stage, stride, dtype, rngs))
                features = block.expansion * width * 2**stage
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns float32 logits for uint8 images of shape (batch, height, width, channels)."""
        x = (images.astype(jnp.float32) / 127.5 - 1).astype(self.dtype)
        x = nnx.relu(self.stem_norm(self.stem(x), use_running_average=not train))
        if self.large_stem:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x, train)
        return self.head(x.astype(jnp.float32).mean(axis=(1, 2)))


def create(
    name: str, channels: int, num_classes: int, seed: int, dtype: DTypeLike = jnp.float32
) -> ResNet:
    """Creates a model with its initial parameters.

    Args:
        name: A key of ``IMAGE_SIZE``.
        channels: Channels of the images.
        num_classes: Number of logits.
        seed: Seed of the initial parameters.
        dtype: Dtype in which convolutions and norms compute. Parameters, batch statistics and the
            classifier are always float32.

    Raises:
        ValueError: If there is no model of this name.
    """
    if name not in ARCHITECTURES:
        raise ValueError(f"model must be one of {', '.join(IMAGE_SIZE)}, got {name!r}.")
    # This generator compiles in a third of the time of JAX's default generator. JAX compiles one
    # program for each shape.
    rngs = nnx.Rngs(jax.random.key(seed, impl="rbg"))
    return ResNet(*ARCHITECTURES[name], channels, num_classes, dtype, rngs)
