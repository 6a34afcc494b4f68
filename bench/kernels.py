"""The speed of the compiled code that rounds to 8 and 4 bits, on one core.

    python bench/kernels.py [--megabytes 64]

Gigabytes of float32 in a second: of a copy (memcpy), of rounding changes to blocks with error
feedback, which a step that posts does, of receiving rounded sums, which a step that merges does,
and of decoding blocks, which the progress thread does. The numbers do not fit a cache.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

import numpy as np
from machine import machine, memcpy_seconds, own_core

from jdaso.core.block_format import BLOCK_SIZE, FORMATS
from jdaso.exchange.host import compiled

REPEATS = 15
# The names of the functions of block_kernels.h in the library.
SEND = "_ZN5jdaso10SendBlocksEiPKfS1_PfPhm"
RECEIVE = "_ZN5jdaso13ReceiveBlocksEiPKffS1_PfS2_m"


def seconds(function, *arguments) -> float:
    """The median time of a call."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=64, help="of float32")
    size = int(parser.parse_args().megabytes * 250_000) // BLOCK_SIZE * BLOCK_SIZE
    own_core()
    library = compiled.load()
    if isinstance(library, str):
        raise SystemExit(library)
    rng = np.random.default_rng(0)
    leaf, anchor, sums, mean = (rng.normal(size=size).astype(np.float32) for _ in range(4))
    residual, count = np.zeros(size, np.float32), ctypes.c_size_t(size)
    arrays = leaf, anchor, sums, mean, residual
    own, start, total, out, error = (ctypes.c_void_p(x.ctypes.data) for x in arrays)

    def rate(function, *arguments) -> str:
        return f"{4e-9 * size / seconds(function, *arguments):.1f}"

    print(f"{machine()}\n\n| wire | copy | pack with feedback | receive | decode |")
    print("|---|---|---|---|---|")
    copy = f"{4e-9 * size / memcpy_seconds(4e-6 * size):.1f}"
    for name, rows in FORMATS.items():
        packed = np.zeros((size // BLOCK_SIZE, rows.row_bytes), np.uint8)
        blocks, bits = ctypes.c_void_p(packed.ctypes.data), ctypes.c_int32(rows.bits)
        cells = [
            rate(library[SEND], bits, own, start, error, blocks, count),
            rate(library[RECEIVE], bits, total, ctypes.c_float(2), start, error, out, count),
            rate(library.jdaso_unpack_blocks, bits, blocks, ctypes.c_size_t(len(packed)), out),
        ]
        print(f"| {name} | {copy} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
