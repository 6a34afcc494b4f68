"""Rounding errors of formats with 8 and 4 bits in blocks of 64 with a power of two as scale.

    python bench/formats.py

The table has the mean squared error of one rounding, relative to the mean square of the numbers,
for numbers of three distributions. int8 and float4 are the wires. E3M0 are the 4-bit floats of
Streaming DiLoCo (arXiv:2501.18512, Sec. 2.4), and int4 the integers from -7 to 7.
"""

from __future__ import annotations

import numpy as np
from machine import machine

from jdaso.core.block_format import BLOCK_SIZE, FORMATS, pack, unpack

# Nonnegative numbers that a format can hold, times a power of two.
VALUES = {"int4": np.arange(8), "E3M0": np.append(0, 2.0 ** np.arange(7))}
COUNT = 1 << 16


def to_nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Rounds blocks to the nearest of the values, with the smallest scale at which all fit."""
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / values[-1]))
    limits = (values[1:] + values[:-1]) / 2
    return np.sign(numbers) * values[np.searchsorted(limits, np.abs(numbers) / scale)] * scale


def main() -> None:
    rng = np.random.default_rng(0)
    shape = (COUNT, BLOCK_SIZE)
    distributions = {
        "normal": rng.normal(size=shape),
        "Laplace": rng.laplace(size=shape),
        "Student's t, 3 degrees of freedom": rng.standard_t(3, size=shape),
    }
    formats = {
        name: lambda x, rows=rows: unpack(pack(x.astype(np.float32), rows))
        for name, rows in FORMATS.items()
    }
    formats |= {
        name: lambda x, values=values: to_nearest(x, values) for name, values in VALUES.items()
    }
    print(f"{machine()}\n\n| format | {' | '.join(distributions)} |")
    print("|---|" + "---|" * len(distributions))
    for name, rounded in formats.items():
        errors = [
            np.square(rounded(x) - x).mean() / np.square(x).mean() for x in distributions.values()
        ]
        print(f"| {name} | {' | '.join(f'{error:.5f}' for error in errors)} |")


if __name__ == "__main__":
    main()
