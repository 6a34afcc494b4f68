"""A checksum depends on all that an array is."""

import numpy as np
import pytest

from jdaso.checkpoint.node_part import checksums

ARRAY = np.arange(6, dtype=np.int32).reshape(2, 3)


def test_there_is_one_checksum_for_each_array_in_the_order_of_names():
    first, second = checksums({"state": {"b": ARRAY}}), checksums({"state": {"a": 2 * ARRAY}})
    both = checksums({"state": {"b": ARRAY, "a": 2 * ARRAY}, "in_flight": {}})
    assert both.tolist() == [*second, *first]
    assert both.dtype == np.uint32


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("v", ARRAY),
        ("w", ARRAY.reshape(3, 2)),
        ("w", ARRAY.view(np.float32)),
        ("w", ARRAY ^ np.eye(2, 3, dtype=np.int32)),
        ("w", ARRAY[::-1]),
    ],
    ids=["name", "shape", "dtype", "bits", "order"],
)
def test_another_array_has_another_checksum(name, array):
    assert checksums({"state": {name: array}}) != checksums({"state": {"w": ARRAY}})


def test_the_layout_in_memory_does_not_matter():
    same = checksums({"state": {"w": np.asfortranarray(ARRAY)}})
    assert same == checksums({"state": {"w": ARRAY}})
