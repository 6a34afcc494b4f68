"""Staging buffers: their layout, and their reuse after all devices have read the sums."""

import numpy as np
import pytest

from jdaso.core.block_format import FORMATS
from jdaso.core.wire import wire_shape
from jdaso.exchange.host.buffers import BufferPool, StagingBuffers
from jdaso.exchange.host.layout import LeafSpec

SPECS = [
    LeafSpec((2, 3), np.dtype("float32")),
    LeafSpec((), np.dtype("float16")),
    LeafSpec((4,), np.dtype("f4")),
]


def test_leaves_of_a_dtype_are_contiguous_and_sums_have_their_shapes():
    staging = StagingBuffers(SPECS)
    staging.fill([np.ones((2, 3)), np.float16(2), np.full(4, 3.0)])
    assert [vector.tolist() for vector, _ in staging.pairs] == [[1] * 6 + [3] * 4, [2]]
    for _, sums in staging.pairs:
        sums[:] = np.arange(len(sums))
    assert [np.asarray(total).tolist() for total in staging.read(0, copy=True)] == [
        [[0, 1, 2], [3, 4, 5]],
        0,
        [6, 7, 8, 9],
    ]
    assert all(total.dtype == np.float32 for total in staging.sums)


def test_buffers_are_reused_once_every_device_has_read_the_sums():
    pool = BufferPool()
    staging = pool.acquire(SPECS)
    pool.release(staging, readers=2, reuse=True)
    staging.read(0, copy=True)
    assert pool.acquire(SPECS) is not staging
    staging.read(0, copy=True)
    assert pool.acquire(SPECS) is staging
    assert staging.record["reads"] == 0
    assert pool.acquire(SPECS) is not staging


def test_places_are_those_of_the_buffers_and_of_the_current_record():
    staging = StagingBuffers(SPECS)
    before = staging.record
    staging.reset()
    for places, arrays in zip(staging.places, (staging.leaves, staging.sums), strict=True):
        all_arrays = [*arrays, staging.record]
        assert places["address"].tolist() == [array.ctypes.data for array in all_arrays]
        assert places["most_bytes"].tolist() == [array.nbytes for array in all_arrays]
    assert before.ctypes.data not in places["address"].tolist()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("name", FORMATS)
def test_a_sum_with_padding_may_be_copied_without_it(name, size):
    dtype = FORMATS[name].dtype
    staging = StagingBuffers([LeafSpec(wire_shape((size,), dtype), dtype)])
    place = staging.places.of_sums[0]
    assert place["least_bytes"] <= 4 * size <= place["most_bytes"]


def test_the_pool_keeps_buffers_until_they_are_read_also_those_it_does_not_reuse():
    pool = BufferPool()
    other = [LeafSpec(spec.shape, np.dtype("float16")) for spec in SPECS]
    kept, passing = pool.acquire(SPECS), pool.acquire(SPECS)
    pool.release(kept, readers=1, reuse=True)
    pool.release(passing, readers=1, reuse=False)
    pool.acquire(other)
    assert {id(entry[0]) for entry in pool._in_use} == {id(kept), id(passing)}
    kept.read(0, copy=True), passing.read(0, copy=True)
    pool.acquire(other)
    assert not pool._in_use
    assert pool.acquire(SPECS) is not passing
