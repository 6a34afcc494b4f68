"""Slots: what is posted is collected, by compiled code and by host callbacks, on any device."""

import contextlib
import functools
import shutil
import subprocess
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh
from one_process import memory_of, unsharded

from jdaso.core import wire
from jdaso.core.block_format import FORMATS, pack, to_blocks, unpack
from jdaso.core.exchange import HEADER_SIZE, UNCOUNTED, BoundExchange
from jdaso.core.tree import finite_leaves
from jdaso.core.types import JdasoError
from jdaso.exchange.host import slots
from jdaso.exchange.host.layout import (
    HeldShard,
    Layout,
    LeafSpec,
    Memory,
    Plan,
    Shardings,
)
from jdaso.exchange.host.program import Program, ProgramLeaves
from jdaso.exchange.host.slots import Table

SECONDS = 20.0
HEADER = np.ones(HEADER_SIZE, np.float32)
FLOAT32 = np.dtype("float32")
TEXTS = "{} was posted twice in rank 0", "{} is not in flight in rank 0"
SPECS = [LeafSpec((2, 3), FLOAT32), LeafSpec((), np.dtype("float16")), LeafSpec((4,), FLOAT32)]


# ---- Memory


def test_leaves_of_a_dtype_are_contiguous_and_sums_have_their_shapes():
    memory = memory_of(SPECS)
    memory.fill([np.ones((2, 3)), np.float16(2), np.full(4, 3.0)])
    assert [vector.tolist() for vector, _ in memory.pairs] == [[1] * 6 + [3] * 4, [2]]
    for _, sums in memory.pairs:
        sums[:] = np.arange(len(sums))
    found = [np.asarray(total).tolist() for total in memory.sums_of(0)]
    assert found == [[[0, 1, 2], [3, 4, 5]], 0, [6, 7, 8, 9]]
    assert all(total.dtype == np.float32 for total in memory.sums)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("name", FORMATS)
def test_a_sum_with_padding_may_be_copied_without_it(name, size):
    dtype = FORMATS[name].dtype
    plan = Plan(unsharded([LeafSpec(wire.wire_shape((size,), dtype), dtype)]))
    place = plan.places()[0, 0]
    assert place["least_bytes"] <= 4 * size <= place["most_bytes"]


def test_places_are_those_of_the_views():
    buffer = np.zeros(4096, np.uint8)
    memory = Memory(Plan(unsharded(SPECS)), buffer)
    for place, leaf, total in zip(memory.plan.places()[0], memory.leaves, memory.sums, strict=True):
        assert place["sent"] == leaf.ctypes.data - buffer.ctypes.data
        assert place["wire_bytes"] == leaf.nbytes
        assert place["sums"] == total.ctypes.data - buffer.ctypes.data
        assert place["most_bytes"] == total.nbytes


# ---- States


@pytest.fixture
def table():
    return Table(*TEXTS)


LAYOUT = unsharded([LeafSpec((3,), FLOAT32)])


def post(table, number, values=(1, 2, 3), layout=LAYOUT):
    slot = table.begin_post(number, 2 * number, HEADER, table.register(layout))
    table.memory(slot).fill([np.float32(values)])
    table.end_post(slot)


def serve(table):
    """Completes the next exchange, whose sums are twice what was sent."""
    slot = table.next()
    for vector, sums in table.memory(slot).pairs:
        sums[:] = 2 * vector
    table.done(slot, 2 * HEADER, 12, 1.0, 3.0)
    return slot.number


def collect(table, number, readers=1):
    slot = table.begin_collect(number, readers)
    sums = table.memory(slot).sums[0].tolist()
    table.end_collect(slot, readers, True)
    return sums


def test_exchanges_are_served_in_the_order_in_which_they_are_posted(table):
    for number in (3, UNCOUNTED, 4):
        post(table, number, [number] * 3)
    assert [serve(table) for _ in range(3)] == [3, UNCOUNTED, 4]
    assert table.next() is None
    for number in (4, UNCOUNTED, 3):
        assert collect(table, number) == [2 * number] * 3
    with pytest.raises(JdasoError, match="exchange 4 is not in flight in rank 0"):
        collect(table, 4)
    report = table.report()
    assert (report["exchanges"], report["bytes_sent"], report["seconds_in_flight"]) == (2, 24, 4.0)
    assert [(record.number, record.step) for record in table.records()] == [(4, 8), (3, 6)]
    for record in table.records():
        assert 0 < record.copy_to_host[0] <= record.copy_to_host[1] <= record.wait[0]
        assert record.wait[1] <= record.copy_to_device[0] <= record.copy_to_device[1]


@pytest.mark.parametrize("number", [2, 3])
def test_a_number_is_posted_once_until_numbers_restart(table, number):
    post(table, 3)
    with pytest.raises(JdasoError, match=f"exchange {number} was posted twice in rank 0"):
        post(table, number)
    table.restart()
    post(table, number, [4, 5, 6])  # while the old one is still with the progress thread
    assert [serve(table), serve(table)] == [3, number]
    assert collect(table, number) == [8, 10, 12]
    with pytest.raises(JdasoError, match="exchange 3 is not in flight"):
        collect(table, 3)
    with pytest.raises(JdasoError, match=f"exchange {number} was posted twice"):
        post(table, number)


def test_a_slot_that_is_never_filled_is_an_error_until_it_is_discarded():
    table = Table(*TEXTS, 0.05)
    slot = table.begin_post(7, 0, HEADER, table.register(LAYOUT))
    with pytest.raises(JdasoError, match=r"exchange 7 was reserved but not posted within 0\.05 s"):
        table.await_posted()
    with pytest.raises(JdasoError, match="exchange 7 is not in flight"):
        collect(table, 7)
    table.discard(slot)
    table.await_posted()
    assert table.next() is None


def test_collects_wait_for_the_device_that_posts_and_for_the_sums(table):
    with pytest.raises(JdasoError, match="exchange 8 is not in flight"):
        collect(table, 8)  # with one device it does not wait
    found = []
    thread = threading.Thread(target=lambda: found.append(collect(table, 8, readers=2)))
    thread.start()
    post(table, 8)
    while not table.hurry(0):
        time.sleep(0.001)
    serve(table)
    thread.join(SECONDS)
    assert found == [[2, 4, 6]]
    assert collect(table, 8, readers=2) == [2, 4, 6]
    assert not table.hurry(0)


def test_two_devices_fill_one_slot(table):
    specs = (LeafSpec((1,), FLOAT32), LeafSpec((2,), FLOAT32))
    placements = tuple((HeldShard(device, 0, 1),) for device in (0, 1))
    layout = Layout(specs, placements, unsharded(specs).bounds)
    index = table.register(layout)
    for device in (1, 0):
        assert table.next() is None
        slot = table.begin_post(0, 0, HEADER, index)
        table.memory(slot).leaves[device][...] = 5.0 + device
        table.end_post(slot)
    with pytest.raises(JdasoError, match="exchange 0 was posted twice"):
        table.begin_post(0, 0, HEADER, index)
    serve(table)
    slot = table.begin_collect(0, 2)
    assert [table.memory(slot).sums_of(device)[0].tolist() for device in (0, 1)] == [[10], [12, 12]]


def test_a_consensus_after_one_that_failed_has_its_error(table):
    post(table, UNCOUNTED)
    table.fail(table.next(), "rank 1 (host) is missing")
    with pytest.raises(JdasoError, match=r"^rank 1 \(host\) is missing$"):
        post(table, UNCOUNTED)


@pytest.mark.parametrize("closed", [False, True])
def test_an_error_is_that_of_every_collect(table, closed):
    post(table, 0)
    table.fail(table.next(), "rank 1 (host) is missing")
    if closed:
        table.close()
    for _ in range(2):
        with pytest.raises(JdasoError, match=r"^rank 1 \(host\) is missing$"):
            collect(table, 0)
    with pytest.raises(JdasoError, match="rank 1"):
        table.await_done()
    if closed:
        return
    table.clear()
    table.await_done()
    post(table, 0)
    serve(table)
    assert collect(table, 0) == [2, 4, 6]


def test_what_is_in_flight_keeps_what_was_sent(table):
    for number in (1, 0 + 2):
        post(table, number, [number] * 3)
    serve(table)
    slots = table.in_flight()
    assert [(slot.number, slot.step) for slot in slots] == [(1, 2), (2, 4)]
    assert collect(table, 1) == [2, 2, 2]  # while it is being saved
    post(table, 3, [9, 9, 9])
    assert [table.memory(slot).leaves[0].tolist() for slot in slots] == [[1] * 3, [2] * 3]
    for slot in slots:
        table.release(slot)
    assert len(table.in_flight()) == 2


def test_closing_fails_posts_and_collects_and_what_is_posted_completes(table):
    post(table, 0)
    errors = []

    def wait():
        with pytest.raises(JdasoError, match="the exchange is closed") as error:
            collect(table, 0)
        errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not table.hurry(0):
        time.sleep(0.001)
    table.close()
    thread.join(SECONDS)
    assert errors
    with pytest.raises(JdasoError, match="the exchange is closed"):
        post(table, 1)
    serve(table)


def test_a_list_of_leaves_has_two_slots_and_views_keep_their_memory():
    table, addresses = Table(*TEXTS), []
    for number in range(6):
        post(table, number)
        serve(table)
        for slot in table.in_flight():
            memory = table.memory(slot)
            table.release(slot)
        addresses.append(memory.leaves[0].ctypes.data)
        if number:
            collect(table, number - 1)
    assert len(set(addresses)) == 2
    bfloat16 = unsharded([LeafSpec((3,), np.dtype("bfloat16"))])
    collect(table, 5)
    post(table, 6, layout=bfloat16)
    kept = memory.leaves[0]
    del table, memory
    assert kept.tolist() == [1, 2, 3]


def test_memory_that_cannot_be_pinned_is_warned_of_once(recwarn):
    slots._warn_unpinned.cache_clear()
    table = Table(*TEXTS)
    for number in (0, 1):
        slot = table.begin_post(number, 0, HEADER, table.register(LAYOUT))
        slot.unpinned = 1
        table.end_post(slot)
        assert table.next().number == number
    assert ["ulimit -l" in str(warning.message) for warning in recwarn] == [True]


# ---- Programs


class Echo(threading.Thread):
    """Completes all exchanges; the sums are what was sent."""

    def __init__(self, table):
        super().__init__(daemon=True)
        self.table, self.ended, self.posted, self.problems = table, False, {}, []
        self.start()

    def run(self):
        while not self.ended:
            self.table.wait(0.05)
            self.problems += self.table.problems()
            while slot := self.table.next():
                memory = self.table.memory(slot)
                for total, leaf in zip(memory.sums, memory.leaves, strict=True):
                    np.copyto(total, wire.unpack(leaf))
                self.posted[slot.number] = [leaf.copy() for leaf in memory.leaves]
                self.table.done(slot, HEADER, 0, 0.0, 0.0)


def programs(compiled=True):
    table = Table(*TEXTS)
    slots.register_handlers()
    shardings = Shardings(None, Mesh(np.array(jax.local_devices()[:1]), ("local",)))
    return Program(table, compiled, shardings, contextlib.nullcontext), Echo(table)


@pytest.fixture(params=[True, False], ids=["compiled", "callbacks"])
def program(request):
    program, echo = programs(request.param)
    program.echo = echo
    yield program
    echo.ended = True
    program.close()


def start(program, *leaves, number=0, to=None, header=HEADER):
    @jax.jit
    def run(leaves):
        bound = ProgramLeaves(program, (), leaves)
        return bound.post(jnp.int32(0), number, 0, leaves, jnp.asarray(header), to)[0]

    return jax.block_until_ready(run(list(leaves)))


def finish(program, *shapes, number=0, parts=None):
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    bound = ProgramLeaves(program, (), like)

    @jax.jit
    def run(token):
        sums = []
        for part in parts or [slice(0, len(like))]:
            more, _, token = bound.collect(token, number, like[part], part)
            sums += more
        return sums

    return jax.block_until_ready(run(jnp.int32(0)))


def test_what_is_posted_is_collected(program):
    start(program, jnp.arange(3.0), jnp.ones((2, 2)))
    first, second = finish(program, (3,), (2, 2))
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [[1, 1], [1, 1]]


def test_float32_is_rounded_to_bfloat16_as_a_cast_does(program):
    ties = np.arange(1, 100, dtype=np.uint32) * 0x8000 + 0x3F800000
    special = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    nan = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32)
    any_bits = np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)
    x = np.concatenate([ties, special, nan, any_bits]).view(np.float32)
    start(program, jnp.asarray(x), to="bfloat16")
    (copied,) = finish(program, x.shape)
    with np.errstate(invalid="ignore"):
        expected = x.astype(jnp.bfloat16).astype(np.float32)
    tiny = np.abs(expected) < 2.0**-126  # which XLA may flush to 0
    np.testing.assert_array_equal(copied[~tiny], expected[~tiny])


@pytest.mark.parametrize("size", [0, 1, 64, 1000])
@pytest.mark.parametrize("name", ["int8", "float4"])
def test_blocks_are_rounded_to_the_bits_of_numpy(program, name, size):
    rng, rows = np.random.default_rng(0), FORMATS[name]
    scales = 10.0 ** rng.integers(-30, 30, size)
    leaves = [np.float32(rng.normal(size=size) * scales), np.float32(rng.normal(size=(3, 50)))]
    blocks = [unpack(pack(to_blocks(x), rows)) for x in leaves]
    expected = [
        b.reshape(-1)[: x.size].reshape(x.shape) for b, x in zip(blocks, leaves, strict=True)
    ]
    bound, bits = ProgramLeaves(program, (), leaves), wire.block_bits(name)
    start(program, *leaves, to=name)
    posted = finish(program, *[x.shape for x in leaves])
    in_xla = BoundExchange().rounded
    rounded = [f(leaves, bits) for f in (bound.rounded, jax.jit(bound.rounded), jax.jit(in_xla))]
    for results in (posted, *rounded):
        for x, y in zip(results, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x).view("u4"), y.view("u4"))


@pytest.mark.parametrize("size", [0, 1, 1000])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float16", "bfloat16", "float32", "float64"])
def test_compiled_code_finds_the_leaves_that_are_not_finite(dtype, size):
    program, _ = programs()
    with jax.enable_x64(dtype == "float64"):
        limits = jnp.finfo(dtype)
        fine = jnp.resize(jnp.array([1.5, -0.0, limits.max, limits.min, limits.tiny], dtype), size)
        leaves, expected = [fine, jnp.array(1, dtype), fine.reshape(-1, 1)], [True] * 3
        for wrong in (jnp.nan, jnp.inf, -jnp.inf):
            for place in {0, size // 2, size - 1} if size else ():
                leaves.append(fine.at[place].set(jnp.array(wrong, dtype)))
                expected.append(False)
        for find in (program.finite_leaves, jax.jit(program.finite_leaves), finite_leaves):
            assert find(leaves).tolist() == expected


def test_finding_what_is_not_finite_is_one_call_that_needs_no_derivative():
    program, _ = programs()

    def masked(leaves):
        return sum(jnp.where(program.finite_leaves(leaves), 1.0, 0.0)) * leaves[0].sum()

    leaves = [jnp.ones(1000) for _ in range(9)]
    text = jax.jit(program.finite_leaves).lower(leaves).compile().as_text()
    assert text.count("custom-call(") == 1
    assert "reduce" not in text
    assert jax.grad(masked)(leaves)[0].tolist() == [9.0] * 1000


@pytest.mark.parametrize("name", [None, "bfloat16", "int8"])
def test_a_device_that_does_not_contribute_sends_zeros(program, name):
    header = np.where(np.arange(HEADER_SIZE) == 0, -1, HEADER)
    start(program, jnp.array([1.0, jnp.nan]), to=name, header=header)
    assert finish(program, (2,))[0].tolist() == [0, 0]


def test_parts_are_collected_one_after_the_other():
    program, echo = programs()
    leaves, shapes = [jnp.full(n, float(n)) for n in (1, 2, 3, 4)], [(1,), (2,), (3,), (4,)]
    for number, parts in enumerate(
        ([slice(0, 3), slice(3, 4)], [slice(0, 1), slice(1, 3), slice(3, 4)])
    ):
        start(program, *leaves, number=number)
        sums = finish(program, *shapes, number=number, parts=parts)
        assert [x.tolist() for x in sums] == [x.tolist() for x in leaves]
    echo.ended = True
    program.close()


def test_closing_ends_an_exchange_between_two_parts():
    program, echo = programs()
    start(program, jnp.ones(1), jnp.ones(2))
    like = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (1, 2)]
    bound = ProgramLeaves(program, (), like)
    bound.collect(jnp.int32(0), 0, like[:1], slice(0, 1))
    echo.ended = True
    program.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="the exchange is closed"):
        jax.block_until_ready(bound.collect(jnp.int32(0), 0, like[1:], slice(1, 2)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the exchange is closed"):
        start(program, jnp.ones(3), number=1)


def test_what_uses_a_token_comes_after_what_computes_the_arrays():
    program, echo = programs()
    arrays = [jnp.arange(3.0), jnp.ones((2, 2))]
    bound = ProgramLeaves(program, (), arrays)

    @jax.jit
    def run(token, arrays):
        return bound.after(token, slice(0, 2), [[2 * x for x in arrays], []])

    token, [doubled, nothing] = run(jnp.int32(5), arrays)
    assert token == 5
    assert nothing == []
    for x, y in zip(arrays, doubled, strict=True):
        assert y.tolist() == (2 * x).tolist()
    echo.ended = True


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3,), (2, 3)], "leaf 1 of exchange 7 has 16 bytes, the program copies 24"),
        ([(3,), (3,)], "leaf 1 of exchange 7 has 16 bytes, the program copies 12"),
        ([(3,)], "exchange 7 has 2 leaves, the program copies 1"),
        ([(3,), (2, 2), (1,)], "exchange 7 has 2 leaves, the program copies 3"),
    ],
)
def test_sums_of_other_leaves_are_an_error(program, shapes, message):
    start(program, jnp.arange(3.0), jnp.ones((2, 2)), number=7)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        finish(program, *shapes, number=7)
    assert finish(program, (3,), (2, 2), number=7)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ([3, 4], "exchange 0 has 1 leaves, the program posts 2"),
        ([4], "leaf 0 of exchange 0 has 12 bytes, the program posts 16"),
    ],
)
def test_a_post_of_other_leaves_than_those_of_the_layout_is_an_error(leaves, message):
    program, echo = programs()
    index = echo.table.register(LAYOUT)
    call = jax.ffi.ffi_call(slots.POST, jax.ShapeDtypeStruct((), jnp.int32))
    zeros = [jnp.int32(0)] * 4
    attributes = {"table": np.int32(echo.table.id), "layout": np.int32(index)}
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(*zeros, jnp.asarray(HEADER), *map(jnp.ones, leaves), **attributes)
    echo.ended = True
    program.close()
    echo.table.await_posted()


def test_errors_of_compiled_code_are_told_the_progress_thread():
    program, echo = programs()
    with pytest.raises(jax.errors.JaxRuntimeError, match="JdasoError: exchange 5 is not in flight"):
        finish(program, (3,), number=5)
    until = time.monotonic() + SECONDS
    while not echo.problems and time.monotonic() < until:
        time.sleep(0.01)
    assert echo.problems == ["JdasoError: exchange 5 is not in flight in rank 0"]
    echo.ended = True
    program.close()


def test_no_thread_is_started_by_a_post_or_collect(monkeypatch):
    program, echo = programs()
    start(program, jnp.ones(3))
    finish(program, (3,))

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    start(program, jnp.ones(3), number=1)
    assert finish(program, (3,), number=1)[0].tolist() == [1, 1, 1]
    echo.ended = True


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


def test_the_persistent_cache_tells_tables_layouts_and_parts_apart(cached):
    (program, echo), (other, other_echo) = programs(), programs()
    like = [jax.ShapeDtypeStruct((3,), jnp.float32)] * 2

    def count(program, **options):
        def call(token):
            leaves = [jnp.ones(3)]
            bound = ProgramLeaves(program, (), leaves)
            return bound.post(token, 0, 0, leaves, jnp.asarray(HEADER), None, **options)

        return cached(lambda token: call(token)[0])

    assert [count(program), count(program)] == [1, 1]
    assert [count(other), count(program, relative=True)] == [2, 3]

    def count(program, part):
        bound = ProgramLeaves(program, (), like)
        return cached(lambda token: bound.collect(token, 0, like[part], part)[0])

    first, second = slice(0, 1), slice(1, 2)
    assert [count(program, first), count(program, first)] == [4, 4]
    assert [count(other, first), count(program, second)] == [5, 6]
    echo.ended = other_echo.ended = True


# ---- The state machine under a sanitizer


def test_devices_and_checkpoints_race_for_nothing(tmp_path):
    """Thread sanitizer finds no race while three devices exchange and another thread saves."""
    compiler = shutil.which("g++") or pytest.skip("no g++")
    sources = Path(slots.__file__).parent
    program = tmp_path / "stress"
    flags = ["-g", "-O1", "-std=c++17", "-pthread", f"-I{sources}", "-isystem"]
    build = functools.partial(subprocess.run, capture_output=True, text=True, timeout=600)
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() {}")
    if build([compiler, "-fsanitize=thread", probe, "-o", program]).returncode or (
        build([program]).returncode
    ):
        pytest.skip("no thread sanitizer")
    stress = Path(__file__).with_name("stress.cc"), sources / "slots.cc"
    compiled = build(
        [compiler, "-fsanitize=thread", *flags, jax.ffi.include_dir(), *stress, "-o", program]
    )
    assert compiled.returncode == 0, compiled.stderr
    ended = build([program])
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
