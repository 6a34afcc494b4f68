"""What all peers train, in NumPy alone: networks, first parameters, images and their order.

A network is a list of layers, and whoever builds them in another library as said here computes
the same losses, but for rounding:

- ``("conv", i, o)``: convolution 3x3 without bias, zeros around the image so that it keeps its
  size; batch normalization over the batch with scale and shift, epsilon 1e-5; ReLU; maximum over
  2x2. Parameters ``kernel`` (3, 3, i, o), ``scale`` (o,), ``shift`` (o,).
- ``("dense", i, o)``: ``x @ kernel + bias``, then ReLU unless it is the last layer. Parameters
  ``kernel`` (i, o), ``bias`` (o,).

Images are (height, width, channel); the first dense layer reads them flattened in that order.
The loss is the mean cross entropy of the softmax; the optimizer SGD with momentum 0.9, torch's
kind (``velocity = 0.9 * velocity + gradient``), and one learning rate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

NETWORKS = {
    # 4.04 million parameters: a gradient of 16 MB, and much to compute for each of them.
    "conv": [
        *[("conv", 3, 64), ("conv", 64, 128), ("conv", 128, 256), ("conv", 256, 384)],
        *[("dense", 2 * 2 * 384, 1800), ("dense", 1800, 10)],
    ],
    # 25.2 million, 101 MB. With batches of some hundred images a step takes about a second on one
    # core, as long as the sum of its gradients on a link of 1 Gbit/s.
    "mlp": [
        *[("dense", 32 * 32 * 3, 3072), ("dense", 3072, 3072), ("dense", 3072, 2048)],
        ("dense", 2048, 10),
    ],
}
BATCH = {"conv": 32, "mlp": 384}  # images per node and step
MOMENTUM = 0.9

Parameters = list[dict[str, np.ndarray]]


def first_parameters(network: str, seed: int = 0) -> Parameters:
    """What every node starts from: kernels as He et al. draw them, biases 0, scales 1."""
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


def load(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 32, 32, 3) of uint8 and labels of ``folder``/<class>/*.jpg, classes by name."""
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
    """What the network reads: float32 around 0, most within -2 to 2."""
    return (images.astype(np.float32) / 255 - 0.5) / 0.25


def order(count: int, nodes: int, node: int, batch: int, epoch: int, seed: int = 0) -> np.ndarray:
    """A node's images of an epoch, (steps, batch): every image on one node, or left out."""
    steps = count // (nodes * batch)
    shuffled = np.random.default_rng([seed, epoch]).permutation(count)[: steps * nodes * batch]
    return shuffled.reshape(steps, nodes, batch)[:, node]
