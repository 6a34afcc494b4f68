"""Memory of exchanges: laid out end to end, used again when nobody reads it, and not before."""

import numpy as np

from jdaso.exchange._staging import Pool, Spec, Staging

SPECS = [
    Spec((2, 3), np.dtype("float32")),
    Spec((), np.dtype("float16")),
    Spec((4,), np.dtype("f4")),
]


def test_leaves_of_a_dtype_lie_end_to_end_and_what_is_put_comes_out():
    staging = Staging(SPECS)
    staging.put([np.ones((2, 3)), np.float16(2), np.full(4, 3.0)])
    assert [vector.tolist() for vector, _ in staging.pairs] == [[1] * 6 + [3] * 4, [2]]
    for _, sums in staging.pairs:
        sums[:] = np.arange(len(sums))
    assert [np.asarray(total).tolist() for total in staging.get(copy=True)] == [
        [[0, 1, 2], [3, 4, 5]],
        0,
        [6, 7, 8, 9],
    ]
    assert all(total.dtype == np.float32 for total in staging.sums)


def test_memory_is_used_again_once_every_device_has_taken_the_sums():
    pool = Pool()
    staging = pool.take(SPECS)
    pool.give_back(staging, takers=2, spare=True)
    staging.get(copy=True)
    assert pool.take(SPECS) is not staging
    staging.get(copy=True)
    assert pool.take(SPECS) is staging
    assert staging.record["taken"] == 0
    assert pool.take(SPECS) is not staging


def test_addresses_lead_to_the_memory_and_to_the_record_of_this_use():
    staging = Staging(SPECS)
    before = staging.record
    staging.reuse()
    for rows, arrays in zip(staging.addresses, (staging.leaves, staging.sums), strict=True):
        places = [array.ctypes.data for array in [*arrays, staging.record]]
        assert rows.tolist() == places
    assert before.ctypes.data not in rows.tolist()


def test_memory_that_is_read_outlives_another_wire_and_an_exchange_that_is_not_kept():
    pool = Pool()
    other = [Spec(spec.shape, np.dtype("float16")) for spec in SPECS]
    kept, passing = pool.take(SPECS), pool.take(SPECS)
    pool.give_back(kept, takers=1, spare=True)
    pool.give_back(passing, takers=1, spare=False)
    pool.take(other)
    assert {id(entry[0]) for entry in pool._reading} == {id(kept), id(passing)}
    kept.get(copy=True), passing.get(copy=True)
    pool.take(other)
    assert not pool._reading
    assert pool.take(SPECS) is not passing
