"""The all-reduce as an algorithm, on a network that holds messages back as MPI may."""

import numpy as np
import pytest

from jdaso._int8 import pack, unpack
from jdaso._wire import sum_shape
from jdaso.exchange import _all_reduce
from jdaso.exchange._all_reduce import all_reduce, shards


class Network:
    """Matches messages in order for each pair and tag, but completes some receives late."""

    def __init__(self, late):
        self.late = late  # (source, dest, how many-th receive) -> looks until it completes
        self.sent, self.posted, self.count = {}, {}, {}

    def deliver(self, key):
        while self.sent.get(key) and self.posted.get(key):
            self.posted[key].pop(0).data = self.sent[key].pop(0)


class Receive:
    def __init__(self, buffer, looks):
        self.buffer, self.looks, self.data = buffer, looks, None

    def Test(self):
        if self.data is None:
            return False
        self.looks -= 1
        if self.looks >= 0:
            return False
        self.buffer[:] = self.data
        return True


class Sent:
    def Test(self):
        return True


class Member:
    """What all_reduce needs of an mpi4py communicator."""

    def __init__(self, network, rank, size):
        self.network, self.rank, self.size = network, rank, size

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Isend(self, buffer, dest, tag):
        key = (self.rank, dest, tag)
        self.network.sent.setdefault(key, []).append(buffer.copy())
        self.network.deliver(key)
        return Sent()

    def Irecv(self, buffer, source, tag):
        pair, key = (source, self.rank), (source, self.rank, tag)
        number = self.network.count[pair] = self.network.count.get(pair, -1) + 1
        request = Receive(buffer, self.network.late.get((*pair, number), 0))
        self.network.posted.setdefault(key, []).append(request)
        self.network.deliver(key)
        return request


def reduce_all(vectors, chunk_elements, late=()):
    size = len(vectors)
    network = Network(dict(late))
    sums = [np.empty(sum_shape(v.shape, v.dtype), np.float32) for v in vectors]
    running = {
        rank: all_reduce(Member(network, rank, size), vectors[rank], sums[rank], chunk_elements, 2)
        for rank in range(size)
    }
    sent = {}
    for _ in range(10_000):
        for rank, operation in list(running.items()):
            try:
                next(operation)
            except StopIteration as end:
                sent[rank] = end.value
                del running[rank]
        if not running:
            return sums, sent
    pytest.fail(f"members {sorted(running)} have not come to an end")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 7, 1000])
def test_every_member_gets_the_same_sum(size, length):
    rng = np.random.default_rng(0)
    vectors = [rng.normal(size=length).astype(np.float32) for _ in range(size)]
    sums, sent = reduce_all(vectors, chunk_elements=4)
    for total in sums:
        np.testing.assert_array_equal(total, sums[0])
    np.testing.assert_allclose(sums[0], np.sum(vectors, axis=0), rtol=1e-6, atol=1e-6)
    assert sum(sent.values()) == 2 * (size - 1) * length * 4


@pytest.mark.parametrize("chunk_elements", [1, 3, 100])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_blocks_are_rounded_on_the_way_back_but_where_they_were_added_up(size, chunk_elements):
    rng = np.random.default_rng(0)
    vectors = [pack(rng.normal(size=(10, 64)).astype(np.float32)) for _ in range(size)]
    total = sum(map(unpack, vectors))
    assert size == 1 or (unpack(pack(total)) != total).any()
    sums, sent = reduce_all(vectors, chunk_elements)
    for own, arrived in zip(shards(10, size), sums, strict=True):
        expected = unpack(pack(total))
        expected[own] = total[own]
        np.testing.assert_array_equal(arrived, expected)
    assert sum(sent.values()) == 2 * (size - 1) * 10 * 65


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("receiver", [0, 1])
def test_a_late_message_is_not_taken_for_one_of_another_chunk(number, receiver):
    """MPI keeps the order in which messages match, not that in which they complete."""
    chunks = 6 * _all_reduce.WINDOW
    vectors = [np.arange(4 * chunks, dtype=np.float32) * 10**rank for rank in range(2)]
    late = {(1 - receiver, receiver, number): 200}
    sums, _ = reduce_all(vectors, chunk_elements=2, late=late.items())
    for total in sums:
        np.testing.assert_array_equal(total, vectors[0] + vectors[1])
