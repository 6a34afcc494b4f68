"""The all-reduce over a simulated network whose collectives complete in any order."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso.core.block_format import FORMATS, format_of, pack, unpack
from jdaso.core.wire import pack_sum, sum_divisor, sum_dtype, sum_shape
from jdaso.exchange.transport import collectives as module
from jdaso.exchange.transport.collectives import (
    add_in_order,
    all_reduce,
    row_bytes,
    segments,
    shards,
    widen_sums,
    widened,
)


class Network:
    """Matches the collectives of all members in the order in which each member posts them.

    A collective reads and writes its buffers only when it completes. ``late`` gives the polls of a
    member until its i-th collective completes.
    """

    def __init__(self, size, late):
        self.size, self.late = size, late
        self.posted = [[] for _ in range(size)]
        self.sent = [0] * size

    def post(self, rank, kind, own, target):
        request = Request(self, rank, len(self.posted[rank]), kind, own, target)
        self.posted[rank].append(request)
        return request


class Request:
    def __init__(self, network, rank, number, kind, own, target):
        self.network, self.rank, self.number, self.kind = network, rank, number, kind
        self.own, self.target = own, target
        self.polls, self.complete = network.late.get((rank, number), 0), False
        self.result = None

    def Test(self):
        posted = self.network.posted
        if not self.complete and all(len(own) > self.number for own in posted):
            together = [own[self.number] for own in posted]
            assert {request.kind for request in together} == {self.kind}
            if self.result is None:
                for request in together:
                    request.receive(together)
            self.polls -= 1
            self.complete = self.polls < 0
            if self.complete:
                self.target[:] = self.result
                self.own = self.target = None
        return self.complete

    def receive(self, together):
        self.result = self.kind(self.rank, [request.own for request in together], self.target)


class Member:
    """The methods of a communicator that all_reduce needs."""

    def __init__(self, network, rank):
        self.network, self.rank = network, rank

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.network.size

    def Ialltoallv(self, send, receive):
        array, (counts, starts), kind = send
        target, (expected, places), _ = receive
        assert kind == "B"
        assert counts[self.rank] == 0  # a member does not send to itself
        own = target.nbytes // self.network.size
        assert expected == [own * (i != self.rank) for i in range(self.network.size)]
        self.network.sent[self.rank] += sum(counts)
        pieces = [array[a : a + n] for a, n in zip(starts, counts, strict=True)]
        received = [slice(a, a + n) for a, n in zip(places, expected, strict=True)]
        return self.network.post(self.rank, alltoallv, pieces, Scattered(target, received))

    def Iallgather(self, send, receive):
        self.network.sent[self.rank] += (self.network.size - 1) * send.nbytes
        return self.network.post(self.rank, allgather, send, receive)

    def Iallgatherv(self, send, receive):
        assert send is None  # in place
        array, (counts, starts), _ = receive
        places = [slice(a, a + n) for a, n in zip(starts, counts, strict=True)]
        own = array[places[self.rank]]
        self.network.sent[self.rank] += (self.network.size - 1) * own.nbytes
        return self.network.post(self.rank, allgatherv, own, Scattered(array, places))


class Scattered:
    """Places of an array that are written together."""

    def __init__(self, array, places):
        self.array, self.places = array, places

    def __setitem__(self, everything, pieces):
        for place, piece in zip(self.places, pieces, strict=True):
            self.array[place] = piece


def alltoallv(rank, pieces, target):
    return [sent[rank].copy() for sent in pieces]


def allgatherv(rank, pieces, target):
    return [piece.copy() for piece in pieces]


def allgather(rank, vectors, target):
    return np.concatenate(vectors)


def finished(operations):
    """The results of operations, which run in turns."""
    running, results = dict(enumerate(operations)), {}
    for _ in range(10_000):
        for rank, operation in list(running.items()):
            try:
                next(operation)
            except StopIteration as end:
                results[rank] = end.value
                del running[rank]
        if not running:
            return results
    pytest.fail(f"members {sorted(running)} have not completed")


def reduce_all(vectors, chunk_bytes, late=()):
    """Every member's sums and bytes sent."""
    size, dtype = len(vectors), vectors[0].dtype
    network = Network(size, dict(late))
    sums = [np.full(sum_shape(v.shape, dtype), np.nan, sum_dtype(dtype)) for v in vectors]
    wide = dtype == sums[0].dtype
    arrived = sums if wide else [np.zeros_like(vector) for vector in vectors]

    def member(rank):
        spare = [np.full(1 << 12, 255, np.uint8)]  # what is in it does not matter
        buffers = vectors[rank], sums[rank], arrived[rank]
        sent = yield from all_reduce(Member(network, rank), *buffers, chunk_bytes, spare)
        if not wide:
            own = shards(len(vectors[0]), size).of(rank) if format_of(dtype) else slice(0, 0)
            yield from widen_sums(arrived[rank], sums[rank], size, own)
        return sent

    sent = finished(member(rank) for rank in range(size))
    assert [sent[rank] for rank in range(size)] == network.sent
    return sums, sent


def expected_sums(vectors):
    """Added in order in float32, and rounded to the wire dtype."""
    size, dtype = len(vectors), vectors[0].dtype
    total = widened(vectors[0]).copy()
    for vector in vectors[1:]:
        total = total + widened(vector)
    packed = total if dtype == total.dtype else pack_sum(total, dtype, size)
    return widened(packed) * total.dtype.type(sum_divisor(dtype, size))


def bytes_of_all(vectors, chunk_bytes):
    """What all members send together: less where the vectors are longer than one message."""
    size, nbytes = len(vectors), vectors[0].nbytes
    return (size - 1) * nbytes * (size if size * nbytes <= chunk_bytes else 2)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("length", [0, 1, 7, 1000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_member_gets_the_sum_in_order(size, length, dtype):
    rng = np.random.default_rng(0)
    wire = jnp.dtype(dtype)
    vectors = [rng.normal(size=length).astype(wire) for _ in range(size)]
    sums, sent = reduce_all(vectors, chunk_bytes=64)
    for total in sums:
        np.testing.assert_array_equal(total, expected_sums(vectors))
    assert sum(sent.values()) == bytes_of_all(vectors, chunk_bytes=64)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_member_sends_its_share(size):
    """2 (P-1)/P of the vector, except for shards of unequal length."""
    vectors = [np.ones(10_007, np.float32) for _ in range(size)]
    _, sent = reduce_all(vectors, chunk_bytes=4000)
    share = 2 * (size - 1) / size * vectors[0].nbytes
    assert all(abs(count - share) <= 0.01 * share for count in sent.values())


@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 60_000), ("float16", 2**-12), ("float8_e4m3fn", 384)]
)
def test_dtypes_of_short_range_do_not_overflow(dtype, value):
    """The sums are too large, and the means are not."""
    vectors = [np.full(10, value, jnp.dtype(dtype)) for _ in range(8)]
    sums, _ = reduce_all(vectors, chunk_bytes=6)
    np.testing.assert_array_equal(sums, np.full((8, 10), 8 * value, np.float32))


@pytest.mark.parametrize("chunk_bytes", [16, 200, 10_000])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rows", FORMATS.values(), ids=FORMATS)
def test_blocks_are_rounded_except_at_the_member_that_sums_them(rows, size, chunk_bytes):
    rng = np.random.default_rng(0)
    vectors = [pack(rng.normal(size=(10, 64)).astype(np.float32), rows) for _ in range(size)]
    total = sum(map(unpack, vectors))
    assert size == 1 or (unpack(pack(total, rows)) != total).any()
    sums, sent = reduce_all(vectors, chunk_bytes)
    for rank, arrived in enumerate(sums):
        own = shards(10, size).of(rank)
        expected = unpack(pack(total, rows))
        expected[own] = total[own]
        np.testing.assert_array_equal(arrived, expected)
    assert sum(sent.values()) == bytes_of_all(vectors, chunk_bytes)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_members_post_in_the_same_order_whatever_completes_late(seed, dtype):
    """A collective completes late at some members, and those after it do not. MPI allows that."""
    rng = np.random.default_rng(seed)
    vectors = [rng.normal(size=400).astype(jnp.dtype(dtype)) for _ in range(3)]
    late = {(rank, i): rng.integers(0, 60) for rank in range(3) for i in range(100)}
    sums, _ = reduce_all(vectors, chunk_bytes=16, late=late.items())
    np.testing.assert_array_equal(sums, [expected_sums(vectors)] * 3)


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 64), st.integers(0, 99))
def test_terms_are_added_in_order(members, length, at_once, seed):
    terms = np.random.default_rng(seed).normal(size=(members, length)).astype(np.float32)
    total = np.empty(length, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ADDED_AT_ONCE", at_once)
        add_in_order(terms, total)
    expected = terms[0].copy()
    for term in terms[1:]:
        expected += term
    np.testing.assert_array_equal(total, expected)


def test_counts_stay_below_the_limit_of_mpi(monkeypatch):
    vector = np.zeros((100, 65), np.int8)
    monkeypatch.setattr(module, "_SEGMENT_BYTES", 1000)
    places = segments(vector)
    assert [place.start for place in places] == list(range(0, 100, 15))
    assert np.concatenate([vector[place] for place in places]).shape == vector.shape
    assert row_bytes(vector) == 65


def test_counts_of_more_than_2_to_31_elements_fit_into_32_bits():
    vector = np.empty(2**31 + 2**20 + 7, np.uint8)  # memory that is not read takes no space
    counted = 0

    class Comm:
        def Get_rank(self):
            return 1

        def Get_size(self):
            return 3

        def Ialltoallv(self, send, receive):
            nonlocal counted
            for array, numbers, _ in (send, receive):
                assert all(0 <= x < 2**31 for vector in numbers for x in vector)
                assert np.sum(numbers, axis=0).max() <= array.nbytes
            counted += sum(send[1][0])
            raise InterruptedError

    for place in segments(vector):
        segment = vector[place]
        with pytest.raises(InterruptedError):
            next(all_reduce(Comm(), segment, segment, segment, 2**31 - 1, []))
        counted += shards(len(segment), 3).counts[1]  # it sends nothing to itself
    assert counted == len(vector)


@pytest.mark.parametrize("members", [2, 1024, 8192])
def test_messages_are_large_with_many_members(members):
    """64 KB at least, if each shard has as much."""

    class Comm:
        counts = None

        def Get_rank(self):
            return 0

        def Get_size(self):
            return members

        def Ialltoallv(self, send, receive):
            Comm.counts = np.array(send[1][0])
            raise InterruptedError

    vector = np.empty(members << 17, np.uint8)
    with pytest.raises(InterruptedError):
        next(all_reduce(Comm(), vector, vector, vector, 1 << 20, []))
    assert Comm.counts[0] == 0  # its own piece is not sent
    assert (Comm.counts[1:] == (1 << 20 if members == 2 else 1 << 16)).all() or members == 2
