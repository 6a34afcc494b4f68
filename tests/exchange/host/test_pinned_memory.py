"""Staging buffers are pinned once, in whole pages, and unpinned before they are freed."""

import itertools
import mmap

import numpy as np
import pytest

from jdaso.exchange.host import pinned_memory
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.layout import LeafSpec
from jdaso.exchange.host.pinned_memory import PinnedMemory


def staging():
    return StagingBuffers(
        [LeafSpec((3, 5), np.dtype("float32")), LeafSpec((2000,), np.dtype("float16"))]
    )


def test_buffers_are_pinned_once_and_until_they_are_freed():
    pinned = {}
    pins = PinnedMemory(lambda address, size: pinned.setdefault(address, size) == size, pinned.pop)
    memory = staging()
    pins.add(memory)
    pins.add(memory)
    assert memory.used_by_devices
    assert len(pinned) == 4  # leaves and sums of two dtypes
    assert all(a % mmap.PAGESIZE == 0 == size % mmap.PAGESIZE for a, size in pinned.items())
    addresses = sorted(pinned)
    assert all(a + pinned[a] <= b for a, b in itertools.pairwise(addresses))
    leaf = memory.leaves[0]
    del memory
    assert len(pinned) == 1  # the leaf is a view of it
    del leaf
    assert not pinned


def test_a_failure_to_pin_is_warned_of_once(recwarn):
    pinned_memory._warn_once.cache_clear()
    pins = PinnedMemory(lambda address, size: False, pytest.fail)
    pins.add(staging())
    (warning,) = recwarn
    assert str(warning.message).startswith("CUDA cannot pin host memory")
