"""The task of all peers, in NumPy: networks, initial parameters, images and their order.

A network is a list of layers. Implementations of these layers in other libraries compute the same
losses, except for rounding:

- ``("conv", i, o)``: 3x3 convolution without bias, with zero padding that keeps the size, then
  batch normalization with scale and shift and epsilon 1e-5, ReLU, and maximum over 2x2. Parameters
  ``kernel`` (3, 3, i, o), ``scale`` (o,), ``shift`` (o,).
- ``("dense", i, o)``: ``x @ kernel + bias``, then ReLU except in the last layer. Parameters
  ``kernel`` (i, o), ``bias`` (o,).

Images are (height, width, channel). The first dense layer flattens them in that order. The loss is
the mean cross entropy of the softmax. The optimizer is SGD with momentum 0.9 as in torch
(``velocity = 0.9 * velocity + gradient``) and a constant learning rate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

NETWORKS = {
    # 4.04 million parameters, a gradient of 16 MB, with much computation per parameter.
    "conv": [
        *[("conv", 3, 64), ("conv", 64, 128), ("conv", 128, 256), ("conv", 256, 384)],
        *[("dense", 2 * 2 * 384, 1800), ("dense", 1800, 10)],
    ],
    # 25.2 million parameters, 101 MB. With batches of some hundred images a step on one core takes
    # about a second, as long as the sum of the gradients on a link of 1 Gbit/s.
    "mlp": [
        *[("dense", 32 * 32 * 3, 3072), ("dense", 3072, 3072), ("dense", 3072, 2048)],
        ("dense", 2048, 10),
    ],
}
BATCH = {"conv": 32, "mlp": 384}  # images per node and step
MOMENTUM = 0.9

Parameters = list[dict[str, np.ndarray]]


def first_parameters(network: str, seed: int = 0) -> Parameters:
    """The initial parameters of all nodes: kernels as in He et al., biases 0, scales 1."""
    draw = np.random.default_rng(seed)
    layers = []
    for kind, inputs, outputs in NETWORKS[network]:
        shape = (3, 3, inputs, outputs) if kind == "conv" else (inputs, outputs)
        deviation = np.sqrt(2 / np.prod(shape[:-1]))
        kernel = draw.standard_normal(shape, np.float32) * np.float32(deviation)
        zeros, ones = np.zeros(outputs, np.float32), np.ones(outputs, np.float32)
        rest = {"scale": ones, "shift": zeros} if kind == "conv" else {"bias": zeros}
        layers.append({"kernel": kernel, **rest})
    return layers


def number_of_parameters(network: str) -> int:
    return sum(array.size for layer in first_parameters(network) for array in layer.values())


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Loads ``folder``/<class>/*.jpg as uint8 images (n, 32, 32, 3) and labels in name order."""
    from PIL import Image

    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    images, labels = [], []
    for label, path in enumerate(classes):
        for file in sorted(path.glob("*.jpg")):
            with Image.open(file) as image:
                images.append(np.asarray(image.convert("RGB")))
            labels.append(label)
    return np.stack(images), np.array(labels)


def scaled(images: np.ndarray) -> np.ndarray:
    """Scales images to float32 values between -2 and 2."""
    return (images.astype(np.float32) / 255 - 0.5) / 0.25


def order(count: int, nodes: int, node: int, batch: int, epoch: int, seed: int = 0) -> np.ndarray:
    """The indices of a node's images in an epoch, of shape (steps, batch).

    No image is on two nodes. Images that do not fill a batch on every node are left out.
    """
    steps = count // (nodes * batch)
    shuffled = np.random.default_rng([seed, epoch]).permutation(count)[: steps * nodes * batch]
    return shuffled.reshape(steps, nodes, batch)[:, node]
