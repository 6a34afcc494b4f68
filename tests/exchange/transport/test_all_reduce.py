"""The all-reduce over a simulated network that delays messages as MPI may."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdaso.core.int8 import pack, unpack
from jdaso.core.wire import sum_shape
from jdaso.exchange.transport.all_reduce import all_reduce, part, shards
from jdaso.exchange.transport.operation import WINDOW, WaitState, interleave


class Network:
    """Matches messages in order for each pair and tag, but completes some receives late."""

    def __init__(self, late):
        self.late = late  # (source, dest, how many-th receive) -> polls until it completes
        self.sent, self.posted, self.count, self.leaving, self.left = {}, {}, {}, {}, {}

    def deliver(self, key):
        while self.sent.get(key) and self.posted.get(key):
            self.posted[key].pop(0).data = self.sent[key].pop(0)

    def poll(self):
        """Advances the sends, in order, as every poll of a request does."""
        for key, sends in self.leaving.items():
            for send in sends:
                send.polls -= 1
            while sends and sends[0].polls < 0:
                send = sends.pop(0)
                self.sent.setdefault(key, []).append(send.buffer.copy())
                send.buffer = None
            self.deliver(key)


class Receive:
    def __init__(self, network, buffer, polls):
        self.network, self.buffer, self.polls, self.data = network, buffer, polls, None

    def Test(self):
        self.network.poll()
        if self.data is None:
            return False
        self.polls -= 1
        if self.polls >= 0:
            return False
        self.buffer[:] = self.data
        return True


class Send:
    """Reads its buffer only some polls later, as MPI may."""

    def __init__(self, network, buffer):
        self.network, self.buffer, self.polls = network, buffer, 3

    def Test(self):
        self.network.poll()
        return self.buffer is None


class Member:
    """The methods of a communicator that all_reduce needs."""

    def __init__(self, network, rank, size):
        self.network, self.rank, self.size = network, rank, size

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Isend(self, buffer, dest, tag):
        self.network.left[self.rank] = self.network.left.get(self.rank, 0) + buffer.nbytes
        send = Send(self.network, buffer)
        self.network.leaving.setdefault((self.rank, dest, tag), []).append(send)
        return send

    def Irecv(self, buffer, source, tag):
        pair, key = (source, self.rank), (source, self.rank, tag)
        number = self.network.count[pair] = self.network.count.get(pair, -1) + 1
        request = Receive(self.network, buffer, self.network.late.get((*pair, number), 0))
        self.network.posted.setdefault(key, []).append(request)
        self.network.deliver(key)
        return request


def reduce_all(vectors, chunk_elements, late=(), pattern="direct", parts=1):
    """Every member's sums and bytes sent. The parts run interleaved, each on its own network."""
    size = len(vectors)
    networks = [Network(dict(late)) for _ in range(parts)]
    sums = [np.full(sum_shape(v.shape, v.dtype), np.nan, np.float32) for v in vectors]
    owned = shards(len(vectors[0]), size)

    def member(rank):
        return interleave(
            all_reduce(
                Member(networks[index], rank, size),
                vectors[rank],
                sums[rank],
                part(owned, index, parts),
                chunk_elements,
                2,
                pattern,
            )
            for index in range(parts)
        )

    running = {rank: member(rank) for rank in range(size)}
    sent = {}
    for _ in range(10_000):
        for rank, operation in list(running.items()):
            try:
                next(operation)
            except StopIteration as end:
                sent[rank] = end.value
                del running[rank]
        if not running:
            left = {rank: sum(n.left.get(rank, 0) for n in networks) for rank in range(size)}
            assert sent == left
            return sums, sent
    pytest.fail(f"members {sorted(running)} have not completed")


# The largest number of roundings to the wire dtype, for P members.
ROUNDINGS = {
    "direct": lambda size: 2,
    "ring": lambda size: size,
    "halving": lambda size: size.bit_length(),
}
CASES = [
    *(("direct", size) for size in (1, 2, 3, 5)),
    *(("ring", size) for size in (1, 2, 3, 5)),
    *(("halving", size) for size in (1, 2, 4, 8)),
]


@pytest.mark.parametrize(("pattern", "size"), CASES)
@pytest.mark.parametrize("length", [0, 1, 7, 1000])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_member_gets_the_same_sum(pattern, size, length, parts, dtype):
    rng = np.random.default_rng(0)
    wire = jnp.dtype(dtype)
    vectors = [rng.normal(size=length).astype(wire) for _ in range(size)]
    sums, sent = reduce_all(vectors, chunk_elements=4, pattern=pattern, parts=parts)
    for total in sums:
        np.testing.assert_array_equal(total, sums[0])
    wide = [vector.astype(np.float64) for vector in vectors]
    # Half a unit in the last place, of sums bounded by those of the absolute values.
    half = float(jnp.finfo(wire).eps) / 2 * ROUNDINGS[pattern](size) + 1e-7 * size
    assert (np.abs(sums[0] - np.sum(wide, axis=0)) <= half * np.abs(wide).sum(0)).all()
    assert sum(sent.values()) == 2 * (size - 1) * length * wire.itemsize


@pytest.mark.parametrize(("pattern", "size"), CASES)
def test_every_member_sends_its_share(pattern, size):
    """2 (P-1)/P of the vector, except for shards of unequal length."""
    vectors = [np.ones(10_007, np.float32) for _ in range(size)]
    _, sent = reduce_all(vectors, chunk_elements=1000, pattern=pattern)
    share = 2 * (size - 1) / size * vectors[0].nbytes
    assert all(abs(count - share) <= 0.01 * share for count in sent.values())


def test_parts_change_no_bit():
    """Parts change neither the order of addition nor the member that adds."""
    rng = np.random.default_rng(0)
    for vectors in (
        [rng.normal(size=1001).astype(np.float32) for _ in range(3)],
        [pack(rng.normal(size=(101, 64)).astype(np.float32)) for _ in range(3)],
    ):
        whole, _ = reduce_all(vectors, chunk_elements=7)
        in_parts, _ = reduce_all(vectors, chunk_elements=7, parts=4)
        np.testing.assert_array_equal(in_parts, whole)


@pytest.mark.parametrize("pattern", ["direct", "ring", "halving"])
@pytest.mark.parametrize(
    ("dtype", "value"), [("float16", 60_000), ("float16", 2**-12), ("float8_e4m3fn", 384)]
)
def test_dtypes_of_short_range_do_not_overflow(pattern, dtype, value):
    """The sums are too large, and the means are not. A partial sum is divided by its terms only."""
    vectors = [np.full(10, value, jnp.dtype(dtype)) for _ in range(8)]
    sums, _ = reduce_all(vectors, chunk_elements=3, pattern=pattern)
    np.testing.assert_array_equal(sums, np.full((8, 10), 8 * value, np.float32))


def test_an_operation_that_waits_for_no_known_rank_yields():
    """So does the root of a broadcast. The progress thread must be able to poll the others."""

    def root():
        for _ in range(3):
            yield WaitState(frozenset())
        return 7

    operation = interleave([root()])
    assert [next(operation).ranks for _ in range(3)] == [frozenset()] * 3
    with pytest.raises(StopIteration) as end:
        next(operation)
    assert end.value.value == 7


@pytest.mark.parametrize("chunk_elements", [1, 3, 100])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_blocks_are_rounded_except_at_the_member_that_sums_them(size, chunk_elements):
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
@pytest.mark.parametrize("pattern", ["direct", "ring", "halving"])
def test_a_late_message_is_not_mistaken_for_one_of_another_chunk(number, receiver, pattern):
    """MPI keeps the order in which messages match, and not the order in which they complete."""
    chunks = 6 * WINDOW
    vectors = [np.arange(4 * chunks, dtype=np.float32) * 10**rank for rank in range(2)]
    late = {(1 - receiver, receiver, number): 200}
    sums, _ = reduce_all(vectors, chunk_elements=2, late=late.items(), pattern=pattern)
    for total in sums:
        np.testing.assert_array_equal(total, vectors[0] + vectors[1])
