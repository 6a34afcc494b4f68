"""Memory of exchanges is pinned once, in whole pages, and unpinned before it is freed."""

import itertools
import mmap

import numpy as np
import pytest

from jdaso.exchange import _pinning
from jdaso.exchange._pinning import Pins
from jdaso.exchange._staging import Spec, Staging


def staging():
    return Staging([Spec((3, 5), np.dtype("float32")), Spec((2000,), np.dtype("float16"))])


def test_memory_is_pinned_once_and_until_it_is_freed():
    pinned = {}
    pins = Pins(lambda place, size: pinned.setdefault(place, size) == size, pinned.pop)
    memory = staging()
    pins.add(memory)
    pins.add(memory)
    assert memory.for_devices
    assert len(pinned) == 4  # leaves and sums of two dtypes
    assert all(place % mmap.PAGESIZE == 0 == size % mmap.PAGESIZE for place, size in pinned.items())
    places = sorted(pinned)
    assert all(a + pinned[a] <= b for a, b in itertools.pairwise(places))
    leaf = memory.leaves[0]
    del memory
    assert len(pinned) == 1  # a view of it is left
    del leaf
    assert not pinned


def test_where_memory_cannot_be_pinned_it_is_said_once(recwarn):
    _pinning._warn_once.cache_clear()
    pins = Pins(lambda place, size: False, pytest.fail)
    pins.add(staging())
    (warning,) = recwarn
    assert str(warning.message).startswith("CUDA cannot pin host memory")
