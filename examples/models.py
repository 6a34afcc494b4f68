"""Residual networks (He et al. 2016) in flax.nnx: CIFAR's ResNet-20 and ImageNet's ResNet-50."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

# BatchNorm takes mean and variance over all devices of a node, the axis that is bound inside
# jdaso.local_value_and_grad; between nodes they differ, as in DASO.
LOCAL_AXIS = "local"

IMAGE_SIZE = {"resnet20": 32, "resnet50": 224}

conv = functools.partial(
    nnx.Conv,
    use_bias=False,
    kernel_init=nnx.initializers.variance_scaling(2.0, "fan_out", "normal"),
)
norm = functools.partial(nnx.BatchNorm, momentum=0.9, axis_name=LOCAL_AXIS)
# A block whose last scale is 0 starts as the identity, which makes deep networks train at once.
last_norm = functools.partial(norm, scale_init=nnx.initializers.zeros_init())


class Shortcut(nnx.Module):
    """The identity, or a projection where a block changes the shape."""

    def __init__(self, features: int, out: int, stride: int, rngs: nnx.Rngs):
        self.project = stride != 1 or features != out
        if self.project:
            self.conv = conv(features, out, (1, 1), strides=stride, rngs=rngs)
            self.norm = norm(out, rngs=rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        return self.norm(self.conv(x), use_running_average=not train) if self.project else x


class BasicBlock(nnx.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, features: int, width: int, stride: int, rngs: nnx.Rngs):
        self.conv1 = conv(features, width, (3, 3), strides=stride, rngs=rngs)
        self.norm1 = norm(width, rngs=rngs)
        self.conv2 = conv(width, width, (3, 3), rngs=rngs)
        self.norm2 = last_norm(width, rngs=rngs)
        self.shortcut = Shortcut(features, width, stride, rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = self.norm2(self.conv2(y), use_running_average=not train)
        return nnx.relu(y + self.shortcut(x, train))


class Bottleneck(nnx.Module):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 one strides (version 1.5)."""

    expansion = 4

    def __init__(self, features: int, width: int, stride: int, rngs: nnx.Rngs):
        out = self.expansion * width
        self.conv1 = conv(features, width, (1, 1), rngs=rngs)
        self.norm1 = norm(width, rngs=rngs)
        self.conv2 = conv(width, width, (3, 3), strides=stride, rngs=rngs)
        self.norm2 = norm(width, rngs=rngs)
        self.conv3 = conv(width, out, (1, 1), rngs=rngs)
        self.norm3 = last_norm(out, rngs=rngs)
        self.shortcut = Shortcut(features, out, stride, rngs)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x), use_running_average=not train))
        y = nnx.relu(self.norm2(self.conv2(y), use_running_average=not train))
        y = self.norm3(self.conv3(y), use_running_average=not train)
        return nnx.relu(y + self.shortcut(x, train))


class ResNet(nnx.Module):
    """Stem, stages of blocks at halved resolution and doubled width, mean, linear classifier."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        stages: tuple[int, ...],
        width: int,
        large_stem: bool,
        channels: int,
        num_classes: int,
        rngs: nnx.Rngs,
    ):
        self.large_stem = large_stem
        kernel, stride = ((7, 7), 2) if large_stem else ((3, 3), 1)
        self.stem = conv(channels, width, kernel, strides=stride, rngs=rngs)
        self.stem_norm = norm(width, rngs=rngs)
        blocks, features = [], width
        for stage, depth in enumerate(stages):
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(block(features, width * 2**stage, stride, rngs))
                features = block.expansion * width * 2**stage
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, num_classes, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Logits of images, uint8 of shape (batch, height, width, channels)."""
        x = images.astype(jnp.float32) / 127.5 - 1
        x = nnx.relu(self.stem_norm(self.stem(x), use_running_average=not train))
        if self.large_stem:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x, train)
        return self.head(x.mean(axis=(1, 2)))


def create(name: str, channels: int, num_classes: int, seed: int) -> ResNet:
    """The model of that name, ``resnet20`` or ``resnet50``, with its first parameters."""
    rngs = nnx.Rngs(seed)
    if name == "resnet20":
        return ResNet(BasicBlock, (3, 3, 3), 16, False, channels, num_classes, rngs)
    if name == "resnet50":
        return ResNet(Bottleneck, (3, 4, 6, 3), 64, True, channels, num_classes, rngs)
    raise ValueError(f"model must be one of {', '.join(IMAGE_SIZE)}, got {name!r}.")
