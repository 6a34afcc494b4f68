"""Exchanges of one process: what it posts is what it collects. Also with a simulated CUDA driver.

Tests and bench/gpu.py run what posts and collects, without MPI.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np

from jdaso.core import wire
from jdaso.core.exchange import HEADER_SIZE
from jdaso.exchange.host import slots
from jdaso.exchange.host.layout import HeldShard, Layout, LeafSpec, Memory, Plan

HEADER = np.ones(HEADER_SIZE, np.float32)


def use_stand_in(path: str, devices: int) -> ctypes.CDLL:
    """Replaces the compiled library by that of cuda_stand_in, which serves CPU devices."""
    library = slots.open_library(path)
    assert library.jdaso_driver(path.encode()) is None
    slots.load, slots.computes = lambda: library, lambda platform: False
    slots.register_handlers("cpu", "_cuda")
    slots.register_handlers = lambda *_: None
    for device in range(devices):
        library.jdaso_prepare(device, error := ctypes.create_string_buffer(99), 99)
        assert not error.value, error.value
    return library


def unsharded(specs: Sequence[LeafSpec]) -> Layout:
    """The layout of leaves on one device, given by their shapes on the wire."""
    placements = tuple(HeldShard(i, 0, 1) for i in range(len(specs)))
    bounds = tuple((i, tuple((0, n) for n in spec.shape)) for i, spec in enumerate(specs))
    return Layout(tuple(specs), (placements,), bounds, tuple(spec.shape for spec in specs))


def memory_of(specs: Sequence[LeafSpec]) -> Memory:
    """New memory for leaves on one device."""
    return Memory(Plan(unsharded(specs)))


def served_table(on_problem: Callable[[str], None] = print) -> slots.Table:
    """A table whose exchanges a thread completes; the sums are what was sent."""
    table = slots.Table("{} was posted twice", "{} is not in flight")

    def serve():
        while True:
            table.wait(0.05)
            for problem in table.problems():
                on_problem(problem)
            while slot := table.next():
                memory = table.memory(slot)
                for total, leaf in zip(memory.sums, memory.leaves, strict=True):
                    np.copyto(total, wire.unpack(leaf))
                table.done(slot, HEADER, 0, 0.0, 0.0)

    threading.Thread(target=serve, daemon=True).start()
    return table
