"""Damaged checkpoints and foreign files raise an error, or restore exactly what was saved."""

import asyncio
import gc
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jdaso
from jdaso.checkpoint import Checkpoints
from jdaso.checkpoint.node_part import checkpointer, checksums, part_tree, read_part
from jdaso.checkpoint.verify import verify
from jdaso.core.exchange import HEADER_SIZE

TOPOLOGY = jdaso.discover_topology()
EXCHANGE = jdaso.single_exchange()
NAME, PART = "000001_step_5", "node_0_of_1"
# orbax prints no errors of its own beside the message.
pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("error:coroutine:RuntimeWarning"),
]


def state():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(40, 30)),
        "zeros": np.zeros((40, 30), np.float32),
        "n": np.arange(5),
        "step": 5,
    }


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    checkpoints = Checkpoints(folder, TOPOLOGY, EXCHANGE)
    checkpoints.save(5, state())
    checkpoints.close()
    return folder


def restored(folder):
    """The result of restore, or None if it raises an error."""
    checkpoints = Checkpoints(folder, TOPOLOGY, EXCHANGE)
    try:
        found = checkpoints.restore(state())
    except (jdaso.JdasoError, ValueError):
        return None
    finally:
        checkpoints.close()
    return found


def test_unreadable_arrays_print_nothing_but_the_error(tmp_path):
    """One array cannot be read while many others are still being read."""
    rows = np.random.default_rng(0).normal(size=(100, 2000))
    writer = checkpointer()
    writer.save(tmp_path / PART, part_tree({f"w{i}": row for i, row in enumerate(rows)}, {}))
    writer.close()
    reader = checkpointer()
    largest = max(tmp_path.rglob("d/*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    for _ in range(3):
        with pytest.raises(jdaso.JdasoError, match="cannot be read; it is damaged"):
            read_part(reader, tmp_path / PART)
        gc.collect()
    reader.close()


def test_other_threads_have_their_own_event_loops_during_a_read():
    made = []

    class Reader:
        def restore(self, path):
            make = threading.Thread(target=lambda: made.append(asyncio.new_event_loop()))
            make.start()
            make.join()
            return part_tree({"w": np.ones(1)}, {})

    before = asyncio.new_event_loop
    read_part(Reader(), Path("nowhere"))
    (loop,) = made
    loop.close()
    assert type(loop) is asyncio.SelectorEventLoop
    assert asyncio.new_event_loop is before


def assert_saved_or_refused(folder):
    found = restored(folder)
    _, defects = verify(folder)
    if found is None:
        assert defects
        return
    assert not defects
    for name, x in state().items():
        np.testing.assert_array_equal(found.state[name], x)


def files(folder):
    return sorted(path for path in (folder / NAME).rglob("*") if path.is_file())


def damage(path, how, where, byte):
    content = bytearray(path.read_bytes())
    at = int(where * len(content))
    if how == "truncated":
        path.write_bytes(content[:at])
    elif how == "flipped" and content:
        content[at] ^= byte
        path.write_bytes(content)
    elif how == "deleted":
        path.unlink()
    elif how == "replaced":
        path.write_bytes(bytes([byte]) * 100)
    elif how == "longer":
        path.write_bytes(content + bytes([byte]) * 10)
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "a link to itself":
        path.unlink()
        path.symlink_to(path)


HOW = ["truncated", "flipped", "flipped", "deleted", "replaced", "longer", "a folder"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([*HOW, "a link to itself"]),
    st.integers(0, 10**6),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 255),
)
def test_a_damaged_file_is_an_error_or_does_no_harm(
    sound, tmp_path_factory, how, which, where, byte
):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    there = files(folder)
    damage(there[which % len(there)], how, where, byte)
    assert_saved_or_refused(folder)
    shutil.rmtree(folder)


def test_a_flipped_bit_of_a_number_is_found(tmp_path):
    """Independent of what the file format checks: one number of the tree is changed."""
    tree = part_tree({"w": np.ones(4), "n": np.arange(3)}, {})
    tree["state"]["w"][2] = np.nextafter(1.0, 2.0)
    with pytest.raises(jdaso.JdasoError, match=r"checksum of w does not match"):
        write(tmp_path, tree, {"w": np.ones(4), "n": np.arange(3)})


def write(folder, tree, like):
    """Writes a tree with orbax and restores it."""
    with checkpointer() as writer:
        writer.save(folder / NAME / PART, tree)
    return Checkpoints(folder, TOPOLOGY, EXCHANGE).restore(like)


HEADER = np.zeros(HEADER_SIZE, np.float32)
FOREIGN = {
    "of another program": {"params": {"w": np.ones(3)}},
    "with more": {"state": {"w": np.ones(3)}, "code": {"x": np.ones(1)}},
    "nested": {"state": {"w": {"deep": np.ones(3)}}},
    "without checksums": {"state": {"w": np.ones(3)}},
}
GOOD = {
    "0.7.step": np.int64(1),
    "0.7.header": HEADER,
    "0.7.block_bits": np.zeros(1, np.int64),
    "0.7.relative": np.bool_(False),
    "0.7.leaf.0": np.ones(2, np.float32),
}


def without(name):
    return {other: array for other, array in GOOD.items() if other != name}


# Arrays, and what the error says.
BAD_EXCHANGES = {
    "exchange without a number": ({**GOOD, "0.first.step": np.int64(1)}, "invalid literal"),
    "exchange without a step": (without("0.7.step"), "lacks the array 'step'"),
    "header of another size": ({**GOOD, "0.7.header": np.ones(99, np.float32)}, "a header of"),
    "agreement that is not finite": ({**GOOD, "0.7.header": HEADER + np.inf}, "must have finite"),
    "step that is a list": ({**GOOD, "0.7.step": np.arange(2)}, "must have scalars"),
    "other bits": ({**GOOD, "0.7.block_bits": np.array([5])}, "block_bits of 0, 4 or 8"),
    "bits of more leaves": (
        {**GOOD, "0.7.block_bits": np.zeros(2, np.int64)},
        r"block_bits of 0, 4 or 8 for each leaf, got \[0 0\]",
    ),
    "leaf 1 without leaf 0": (
        {**without("0.7.leaf.0"), "0.7.leaf.1": np.ones(2, np.float32)},
        "lacks the array 'leaf.0'",
    ),
    "something else": ({**GOOD, "0.7.more": np.ones(2)}, "belongs to no exchange"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_jdaso_has_not_written_is_refused(tmp_path, name):
    with pytest.raises(jdaso.JdasoError, match=f"rank 0 .*{NAME}.* cannot be read"):
        write(tmp_path, FOREIGN[name], {"w": np.ones(3)})


@pytest.mark.parametrize("name", BAD_EXCHANGES)
def test_malformed_exchanges_are_refused(tmp_path, name):
    arrays, message = BAD_EXCHANGES[name]
    tree = part_tree({"w": np.ones(3)}, {}) | {"in_flight": arrays}
    tree["checksums"] = checksums({at: tree[at] for at in ("state", "in_flight", "about")})
    with pytest.raises(jdaso.JdasoError, match=rf"cannot be read.*\(ValueError: .*{message}"):
        write(tmp_path, tree, {"w": np.ones(3)})


NAMES = [
    "000002_step_",
    "000002_step_7x",
    "2_step_7",
    "000002_step_-7",
    "000002_step_" + "9" * 200,
    "9" * 200 + "_step_7",
    "\u0660\u0660\u0660\u0660\u0660\u0662_step_\u0667",  # digits of another script
    "000002_step_7",
    "000002_step_7/node_0_of_999999999999",
    "000002_step_7/node_0_of_99999999",
    "000002_step_7/node_0_of_0",
    "000002_step_7/node_00_of_01",
    "000002_step_7/node_1_of_1",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_other_names_are_ignored_and_cost_no_time(sound, tmp_path, name, kind):
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("hello")
    else:
        path.symlink_to(path)
    before = time.process_time()
    checkpoints = Checkpoints(tmp_path, TOPOLOGY, EXCHANGE)
    assert checkpoints.steps() == [5]
    assert time.process_time() - before < 5  # a list of 10^8 names would take a minute
    assert verify(tmp_path)[1] == []


def test_a_link_is_deleted_and_not_what_it_leads_to(sound, tmp_path):
    precious, folder = tmp_path / "precious", tmp_path / "checkpoints"
    shutil.copytree(sound / NAME, precious)
    folder.mkdir()
    (folder / NAME).symlink_to(precious)
    checkpoints = Checkpoints(folder, TOPOLOGY, EXCHANGE, keep=1)
    assert checkpoints.restore(state()).step == 5
    for step in (6, 7):
        checkpoints.save(step, state())
        checkpoints.wait()
    assert checkpoints.steps()[-1] == 7
    checkpoints.close()
    assert os.listdir(precious) == [PART]
    assert os.listdir(precious / PART)
