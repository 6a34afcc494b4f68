"""Rounding errors and speed of formats with 8 and 4 bits in blocks of 64 that share a scale.

    python bench/formats.py [--megabytes 64]

The first table has the mean squared error of one rounding, relative to the mean square of the
numbers, for numbers of three distributions. A scale is a power of two. int8 and float4 are the
wires. E3M0 are the 4-bit floats of Streaming DiLoCo (arXiv:2501.18512, Sec. 2.4), and int4 the
integers from -7 to 7.

The second table has gigabytes of float32 in a second, on one core: of a copy (memcpy), and of what
the progress thread does in compiled code: it adds the blocks of two members, and decodes blocks.
The numbers do not fit a cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from machine import header, machine, memcpy_seconds, own_core, row

from jdaso.core.block_format import BLOCK_SIZE, FORMATS, pack, unpack
from jdaso.exchange.host.slots import load, sum_blocks, unpack_blocks

# Nonnegative numbers that a format can hold, times a power of two.
VALUES = {"int4": np.arange(8), "E3M0": np.append(0, 2.0 ** np.arange(7))}
COUNT, REPEATS = 1 << 16, 15


def to_nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Rounds blocks to the nearest of the values, with the smallest scale at which all fit."""
    largest = np.abs(numbers).max(axis=-1, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(largest / values[-1]))
    limits = (values[1:] + values[:-1]) / 2
    return np.sign(numbers) * values[np.searchsorted(limits, np.abs(numbers) / scale)] * scale


def print_errors() -> None:
    """The error of each format for each distribution."""
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
    print(header("format", *distributions))
    for name, rounded in formats.items():
        errors = [
            np.square(rounded(x) - x).mean() / np.square(x).mean() for x in distributions.values()
        ]
        print(row(name, *(f"{error:.5f}" for error in errors)))


def print_speed(megabytes: float) -> None:
    """The speed of the compiled code, on one core."""
    size = int(megabytes * 250_000) // BLOCK_SIZE * BLOCK_SIZE
    rng = np.random.default_rng(0)
    terms = rng.normal(size=(2, size // BLOCK_SIZE, BLOCK_SIZE)).astype(np.float32)
    sums = np.empty(terms.shape[1:], np.float32)

    def rate(function, *arguments) -> str:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            function(*arguments)
            times.append(time.perf_counter() - start)
        return f"{4e-9 * size / statistics.median(times):.1f}"

    print(header("wire", "memcpy", "add two", "decode"))
    copy = f"{4e-9 * size / memcpy_seconds(4e-6 * size):.1f}"
    for name, rows in FORMATS.items():
        packed = pack(terms, rows)
        rounded = np.empty_like(packed[0])
        adding = rate(sum_blocks, packed, sums, rounded)
        print(row(name, copy, adding, rate(unpack_blocks, rounded, sums)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=64, help="of float32")
    options = parser.parse_args()
    own_core()
    print(machine(), end="\n\n")
    print_errors()
    if isinstance(reason := load(), str):
        raise SystemExit(reason)
    print()
    print_speed(options.megabytes)


if __name__ == "__main__":
    main()
