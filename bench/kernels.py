"""The speed of the compiled code that sums and decodes 8 and 4 bits, on one core.

    python bench/kernels.py [--megabytes 64]

Gigabytes of float32 in a second: of a copy (memcpy), and of what the progress thread does: it adds
the blocks of two members, and decodes blocks. The numbers do not fit a cache.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from machine import machine, memcpy_seconds, own_core

from jdaso.core.block_format import BLOCK_SIZE, FORMATS, pack
from jdaso.exchange.host.slots import load, sum_blocks, unpack_blocks

REPEATS = 15


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
    if isinstance(reason := load(), str):
        raise SystemExit(reason)
    rng = np.random.default_rng(0)
    terms = rng.normal(size=(2, size // BLOCK_SIZE, BLOCK_SIZE)).astype(np.float32)
    sums = np.empty(terms.shape[1:], np.float32)

    def rate(function, *arguments) -> str:
        return f"{4e-9 * size / seconds(function, *arguments):.1f}"

    print(f"{machine()}\n\n| wire | copy | add two | decode |\n|---|---|---|---|")
    copy = f"{4e-9 * size / memcpy_seconds(4e-6 * size):.1f}"
    for name, rows in FORMATS.items():
        packed = pack(terms, rows)
        rounded = np.empty_like(packed[0])
        cells = [rate(sum_blocks, packed, sums, rounded), rate(unpack_blocks, rounded, sums)]
        print(f"| {name} | {copy} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
