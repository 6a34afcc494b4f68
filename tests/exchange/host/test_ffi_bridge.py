"""Compiled code gets an answer to each of its calls, and copies only what has the right size."""

import contextlib
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jdaso.core import wire
from jdaso.core.block_format import FORMATS
from jdaso.core.exchange import HEADER_SIZE
from jdaso.exchange.host import compiled, ffi_bridge
from jdaso.exchange.host.buffers import StagingBuffers
from jdaso.exchange.host.callbacks import Callbacks
from jdaso.exchange.host.exchange_table import ExchangeTable
from jdaso.exchange.host.ffi_bridge import FfiBridge
from jdaso.exchange.host.layout import HeldShard, Layout, LeafSpec, unsharded
from jdaso.exchange.host.transport_protocol import Message

pytestmark = pytest.mark.skipif(
    compiled.unavailable_reason() is not None, reason="no compiled code"
)
HEADER = jnp.ones(HEADER_SIZE, jnp.float32)


class Transport:
    """Returns what was posted; a test replaces its methods."""

    def __init__(self):
        self.pending = ExchangeTable().pending
        self.posted = {}

    def abort_on_error(self):
        return contextlib.nullcontext()

    def reserve(self, number, layout):
        return self.pending.add(number, StagingBuffers(layout.specs), layout)

    def post(self, number, step, header):
        staging = self.posted[number] = self.pending.filled(number)
        for total, leaf in zip(staging.sums, staging.leaves, strict=True):
            np.copyto(total, wire.unpack(leaf))

    def collect(self, number, readers):
        return self.posted[number], np.ones(HEADER_SIZE, np.float32)


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
def bridge(transport):
    bridge = FfiBridge(transport, "cpu", devices=1)
    yield bridge
    bridge.close()


def post(bridge, *leaves, number=0, to=None, header=HEADER):
    specs = [LeafSpec(leaf.shape, np.dtype(to or leaf.dtype)) for leaf in leaves]

    @jax.jit
    def program(leaves):
        message = Message(number, 0, 0, header, leaves)
        return bridge.post([unsharded(specs)], 0, jnp.int32(0), message)[0]

    return jax.block_until_ready(program(list(leaves)))


def collect(bridge, *shapes, number=0, parts=None):
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    @jax.jit
    def program(token):
        sums = []
        for part in parts or [slice(0, len(outputs))]:
            last = part.stop == len(outputs)
            more, _, token = bridge.collect(1, 0, outputs[part], token, number, part, last)
            sums += more
        return sums

    return jax.block_until_ready(program(jnp.int32(0)))


def test_what_is_posted_is_collected(bridge):
    post(bridge, jnp.arange(3.0), jnp.ones((2, 2)))
    first, second = collect(bridge, (3,), (2, 2))
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [[1, 1], [1, 1]]


def test_float32_is_rounded_to_bfloat16_as_a_cast_does(bridge):
    ties = np.arange(1, 100, dtype=np.uint32) * 0x8000 + 0x3F800000
    special = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    nan = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
    any_bits = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    x = np.concatenate([ties, special, nan, any_bits]).view(np.float32)
    post(bridge, jnp.asarray(x), to=jnp.bfloat16)
    (copied,) = collect(bridge, x.shape)
    with np.errstate(invalid="ignore"):
        expected = x.astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(copied, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_device_that_does_not_contribute_sends_zeros(bridge, dtype):
    post(bridge, jnp.array([1.0, jnp.nan]), to=dtype, header=HEADER.at[0].set(0))
    assert collect(bridge, (2,))[0].tolist() == [0, 0]


def test_each_device_that_has_read_the_sums_is_counted_once(bridge, transport):
    post(bridge, jnp.ones(1), jnp.ones(2))
    for reads in (1, 2):
        collect(bridge, (1,), (2,), parts=[slice(0, 1), slice(1, 2)])
        assert transport.posted[0].record["reads"] == reads
    record = transport.posted[0].record
    times = [*record["copy_to_host"], *record["copy_to_device"]]
    assert times == sorted(times)
    assert times[0] > 0


def test_parts_are_collected_one_after_the_other(bridge, transport):
    leaves, shapes = [jnp.full(n, float(n)) for n in (1, 2, 3, 4)], [(1,), (2,), (3,), (4,)]
    three, two = [slice(0, 1), slice(1, 3), slice(3, 4)], [slice(0, 3), slice(3, 4)]
    post(bridge, *leaves)
    assert list(transport.posted) == [0]
    for parts in (two, three):
        sums = collect(bridge, *shapes, parts=parts)
        assert [x.tolist() for x in sums] == [x.tolist() for x in leaves]


def test_devices_copy_their_parts_in_any_order(bridge, transport):
    """Leaves of 1 and 2 numbers for each of two devices, which copy each leaf as a part."""
    specs = [LeafSpec((n,), np.dtype("float32")) for n in (1, 1, 2, 2)]
    placements = [[HeldShard(i + device, 0, 1) for i in (0, 2)] for device in (0, 1)]
    layout = Layout(tuple(specs), tuple(map(tuple, placements)), unsharded(specs).bounds)
    staging = transport.posted[0] = StagingBuffers(specs)
    staging.layout = layout
    for total, value in zip(staging.sums, (1, 2, 3, 4), strict=True):
        total[...] = value

    @jax.jit
    def program(token):
        found = []
        for leaf, size in enumerate((1, 2)):
            for device in (0, 1):
                part, like = slice(leaf, leaf + 1), [jax.ShapeDtypeStruct((size,), jnp.float32)]
                sums, _, token = bridge.collect(2, device, like, token, 0, part, leaf == 1)
                found += sums
        return found

    found = jax.block_until_ready(program(jnp.int32(0)))
    assert [x.tolist() for x in found] == [[1], [2], [3, 3], [4, 4]]


def test_closing_ends_an_exchange_between_two_parts(bridge):
    post(bridge, jnp.ones(1), jnp.ones(2))
    collect(bridge, (1,), (2,), parts=[slice(0, 1)])
    bridge.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="the exchange is closed"):
        collect(bridge, (1,), (2,), parts=[slice(1, 2)])


def test_what_uses_a_token_comes_after_what_computes_the_arrays(bridge):
    arrays = jnp.arange(3.0), jnp.ones((2, 2))

    @jax.jit
    def program(token, arrays):
        return bridge.order(token, [[2 * x for x in arrays], []])

    token, [doubled, nothing] = program(jnp.int32(5), arrays)
    assert token == 5
    assert nothing == []
    for x, y in zip(arrays, doubled, strict=True):
        assert y.tolist() == (2 * x).tolist()


@pytest.fixture
def cached(tmp_path):
    """Compiles a function of a token; returns the number of programs in an own persistent cache."""

    def count(function):
        jax.jit(function).lower(jnp.int32(0)).compile()
        return len(list(tmp_path.glob("jit__lambda*-cache")))

    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield count
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def test_the_persistent_cache_tells_queues_layouts_and_parts_apart(bridge, transport, cached):
    other = FfiBridge(transport, "cpu", devices=1)
    layout = unsharded([LeafSpec((3,), np.dtype("float32"))])
    another = layout._replace(fingerprint=1)
    x, first, second = jnp.ones(3), slice(0, 1), slice(1, 2)

    def count(bridge, *layouts):
        message = Message(0, 0, 0, HEADER, [x], ([x], []) if layouts[1:] else ([], []))
        return cached(lambda token: bridge.post(layouts, 0, token, message)[0])

    assert [count(bridge, layout), count(bridge, layout)] == [1, 1]
    assert [count(other, layout), count(bridge, another)] == [2, 3]
    assert count(bridge, layout, another) == 4

    def count(bridge, readers, part=first, last=False):
        like = [jax.ShapeDtypeStruct((3,), jnp.float32)]
        return cached(lambda token: bridge.collect(readers, 0, like, token, 0, part, last))

    assert [count(bridge, 1), count(bridge, 1)] == [5, 5]
    assert [count(other, 1), count(bridge, 2), count(bridge, 1, second)] == [6, 7, 8]
    assert count(bridge, 1, last=True) == 9
    other.close()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3,), (2, 3)], "leaf 1 of exchange 7 has 16 bytes, the program copies 24"),
        ([(3,), (3,)], "leaf 1 of exchange 7 has 16 bytes, the program copies 12"),
        ([(3,)], "exchange 7 has 2 leaves, the program copies 1"),
        ([(3,), (2, 2), (1,)], "exchange 7 has 2 leaves, the program copies 3"),
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_sums_of_other_leaves_are_an_error(bridge, transport, shapes, message, native):
    calls = bridge if native else Callbacks(transport)
    post(calls, jnp.arange(3.0), jnp.ones((2, 2)), number=7)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        collect(calls, *shapes, number=7)
    assert collect(calls, (3,), (2, 2), number=7)[0].tolist() == [0, 1, 2]


def test_buffers_of_other_leaves_are_an_error(bridge, transport):
    def reserve(number, layout):
        staging = StagingBuffers([*layout.specs] * 2)
        return transport.pending.add(number, staging, staging.layout)

    transport.reserve = reserve
    with pytest.raises(jax.errors.JaxRuntimeError, match="exchange 0 has 2 leaves, the program"):
        post(bridge, jnp.ones(3))
    assert 0 not in transport.pending  # nobody waits until it is posted


start_thread = threading.Thread.start


class Program(threading.Thread):
    """A call of compiled code in a thread, so that a test fails if the call gets no answer."""

    def __init__(self, function, *arguments, **options):
        super().__init__(daemon=True)
        self.call, self.message = functools.partial(function, *arguments, **options), None
        start_thread(self)

    def run(self):
        try:
            self.call()
        except Exception as error:
            self.message = str(error)

    def error(self):
        self.join(30)
        assert not self.is_alive(), "no answer"
        return self.message


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_every_error_is_an_answer(bridge, transport, error):
    def fail(*_):
        raise error("the reason")

    post(bridge, jnp.ones(3))
    answers, transport.collect = transport.collect, fail
    assert f"{error.__name__}: the reason" in Program(collect, bridge, (3,)).error()
    transport.reserve = fail
    assert f"{error.__name__}: the reason" in Program(post, bridge, jnp.ones(3), number=1).error()
    transport.collect = answers
    assert collect(bridge, (3,))[0].tolist() == [1, 1, 1]


def test_no_thread_is_needed_later(bridge, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def program():
        post(bridge, jnp.ones(3))
        assert collect(bridge, (3,))[0].tolist() == [1, 1, 1]

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Program(program).error() is None


def test_closing_fails_calls_that_were_taken(bridge, transport, monkeypatch):
    monkeypatch.setattr(ffi_bridge, "_SHUTDOWN_SECONDS", 0.1)
    taken, never = threading.Event(), threading.Event()

    def wait(number, readers):
        taken.set()
        never.wait()

    post(bridge, jnp.ones(3))
    transport.collect = wait
    program = Program(collect, bridge, (3,))
    assert taken.wait(30)
    bridge.close()
    assert "the exchange is closed" in program.error()
    never.set()  # the late answer is ignored
    with pytest.raises(jax.errors.JaxRuntimeError, match="the exchange is closed"):
        post(bridge, jnp.ones(3), number=1)


SHAPES = [(), (0,), (1,), (63,), (64,), (65,), (5, 13), (3, 2, 64), (1000,), (7,)]
VALUES = {
    "of one size": lambda rng, shape: rng.normal(size=shape),
    "of all sizes": lambda rng, shape: (
        rng.normal(size=shape) * 10.0 ** rng.integers(-42, 38, shape)
    ),
    "ties": lambda rng, shape: rng.integers(-254, 255, shape) / 2,
    "zeros of both signs": lambda rng, shape: rng.choice([0.0, -0.0], shape),
    "infinite": lambda rng, shape: rng.choice([np.inf, -np.inf, 3.0], shape),
}


def same_bits(ours, theirs):
    """Equal numbers, but XLA may flush what is below 2^-126 to 0, at each of few operations."""
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4 * 2.0**-126)


def finite_or_zero(x):
    return np.where(np.isfinite(x), x, 0).astype(np.float32)


def drawn(values, count):
    """Leaves of all shapes, ``count`` times."""
    rng = np.random.default_rng(0)
    with np.errstate(over="ignore"):
        return [[VALUES[values](rng, s).astype(np.float32) for s in SHAPES] for _ in range(count)]


@pytest.mark.parametrize("has_anchor", [True, False])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("name", ["int8", "float4", "float32", "bfloat16"])
def test_feedback_is_computed_while_leaves_are_copied(bridge, transport, name, values, has_anchor):
    leaves, residual, anchor = drawn(values, 3)
    if values == "infinite":  # only leaves, or differences would be no numbers
        residual, anchor = drawn("of one size", 2)
    residual = residual[:-1]  # the last leaf is a moment of the optimizer, which has no feedback
    anchor = anchor[:-1] if has_anchor else []
    float32 = np.dtype("f4")
    dtypes = [wire.wire_dtype(float32, each) for each in ("float32", name)]
    layouts = [
        unsharded(
            [
                *(LeafSpec(wire.wire_shape(s, dtype), dtype) for s in SHAPES[:-1]),
                LeafSpec(SHAPES[-1], float32),
            ]
        )
        for dtype in dtypes
    ]

    @functools.partial(jax.jit, donate_argnums=1)
    def program(leaves, residual, anchor):
        message = Message(0, 0, 1, HEADER, leaves, (residual, anchor))
        return bridge.post(layouts, 0, jnp.int32(0), message)[1]

    kept = program(leaves, [jnp.array(r) for r in residual], anchor)
    base = anchor if has_anchor and name in FORMATS else [np.float32(0)] * len(residual)
    *params, moment = leaves
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = [np.asarray(x - a + r) for x, a, r in zip(params, base, residual, strict=True)]
        packed = [wire.pack(v, dtypes[1]) for v in wanted]
        sent = [wire.unpadded(wire.unpack(p), v.shape) for p, v in zip(packed, wanted, strict=True)]
        errors = [finite_or_zero(v - s) for v, s in zip(wanted, sent, strict=True)]
    *sent_params, sent_moment = transport.posted[0].leaves
    same_bits([x.astype(np.float32) for x in sent_params], map(np.float32, packed))
    np.testing.assert_array_equal(sent_moment, moment)
    same_bits(kept, errors)


@pytest.mark.parametrize("has_anchor", [True, False])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("members", "bits"), [(3, 8), (3, 4), (3, 0), (0, 8)])
def test_feedback_is_computed_while_sums_are_copied(
    bridge, transport, values, has_anchor, members, bits
):
    sums, residual, anchor = drawn(values, 3)
    if values == "infinite":
        residual, anchor = drawn("of one size", 2)
    residual = residual[:-1]  # the last sum is that of a moment, which has no feedback
    anchor = anchor[:-1] if has_anchor else []
    post(bridge, *sums)
    header = np.ones(HEADER_SIZE, np.float32)
    header[0] = members
    transport.collect = lambda number, readers: (transport.posted[number], header)
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def program(residual, anchor):
        feedback = jnp.int32(bits), residual, anchor
        whole = slice(0, len(SHAPES))
        results, _, _ = bridge.collect(1, 0, shapes, jnp.int32(0), 0, whole, True, feedback)
        return results[: len(SHAPES)], results[len(SHAPES) :]

    old = [[jnp.array(x) for x in leaves] for leaves in (residual, anchor)]
    (*means, total), kept = program(*old)
    *sums, of_moment = sums
    np.testing.assert_array_equal(total, of_moment)
    base = anchor if has_anchor else [np.zeros_like(r) for r in residual]
    if members == 0:
        same_bits(means, base)
        same_bits(kept, residual)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        received = [wire.rounded(s, wire.WIRE_OF_BITS[bits]) if bits else s for s in sums]
        base = base if bits else [np.float32(0)] * len(residual)
        same_bits(means, [a + s / np.float32(members) for a, s in zip(base, received, strict=True)])
        errors = [finite_or_zero(s - c) for s, c in zip(sums, received, strict=True)]
    same_bits(kept, [r + e for r, e in zip(residual, errors, strict=True)])


def test_a_device_that_does_not_contribute_keeps_its_residuals(bridge):
    layout, header = unsharded([LeafSpec((1, 65), np.dtype("int8"))]), HEADER.at[0].set(0)
    sent = Message(0, 0, 0, header, [jnp.array([jnp.nan])])

    def program(residual, sends):
        message = sent._replace(feedback=([residual], []))
        return bridge.post([layout], 0, jnp.int32(0), message, sends)[1]

    # The second device would not send in any case.
    for sends in (False, True):
        assert jax.jit(program)(jnp.array([0.25]), sends)[0].tolist() == [0.25]


def test_a_device_that_does_not_send_computes_its_residuals(bridge, transport):
    layout = unsharded([LeafSpec((1, 65), np.dtype("int8"))])
    sent = Message(0, 0, 0, HEADER, [jnp.array([127.0, 0.6])])

    @jax.jit
    def program(residual):
        message = sent._replace(feedback=([residual], []))
        return bridge.post([layout], 0, jnp.int32(0), message, jnp.bool_(False))[1]

    [kept] = program(jnp.zeros(2))
    np.testing.assert_array_equal(kept, [0, np.float32(0.6) - 1])
    assert not transport.posted
