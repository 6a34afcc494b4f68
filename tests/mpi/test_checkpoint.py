"""Saved in flight and restored, bit for bit; on another number of nodes, from the mean."""

import re

import pytest
from launch import mpiexec, passes

import jdaso


@pytest.mark.parametrize(
    ("saved_at", "algorithms"),
    [
        (13, ["daso", "easgd", "dasgd int8"]),
        (14, ["dasgd fragments", "moments average"]),
    ],
)
def test_resumed_run_ends_with_the_same_bits(tmp_path, saved_at, algorithms):
    ended = mpiexec(2, "checkpoint.py", tmp_path, saved_at, *algorithms)
    assert ended.returncode == 0, ended.output
    for name in algorithms:
        flying = 3 if name == "dasgd fragments" else 1
        for rank in range(2):
            assert f"rank {rank}: {name} passed, {flying} in flight" in ended.output


@pytest.mark.parametrize(("nodes", "wire"), [(3, "int8"), (1, "float32")])
def test_other_number_of_nodes_goes_on_from_the_mean(tmp_path, nodes, wire):
    passes(mpiexec(2, "other_nodes.py", "save", tmp_path, 2, wire))
    passes(mpiexec(nodes, "other_nodes.py", "restore", tmp_path, 2, wire))


def test_training_goes_on_with_fewer_nodes_and_then_with_more(tmp_path):
    jobs = [3, 2, 3]
    for end in range(1, len(jobs) + 1):
        passes(mpiexec(jobs[end - 1], "going_on.py", tmp_path, *jobs[:end]))


def test_a_part_that_one_node_cannot_read_is_named_by_all(tmp_path):
    passes(mpiexec(2, "other_nodes.py", "save", tmp_path, 2, "float32"))
    (manifest,) = tmp_path.glob("*/node_1_of_2/manifest.ocdbt")
    manifest.write_bytes(b"nothing")
    for nodes in (2, 1):  # each its own; the first reads all
        ended = mpiexec(nodes, "other_nodes.py", "restore", tmp_path, 2, "float32")
        assert ended.returncode != 0
        message = rf"rank {nodes - 1} \(.*\): {manifest.parent} cannot be read; it is damaged"
        # Of the line that is printed at once: orbax's threads print between those of a traceback.
        assert re.search(f"is passed over: {message}", ended.output), ended.output


def test_signal_that_one_node_hears_stops_all_at_the_same_step():
    ended = mpiexec(3, "interrupted.py")
    assert ended.returncode == jdaso.EXIT_TRY_AGAIN, ended.output
    assert sorted(re.findall(r"rank (\d) passed", ended.output)) == ["0", "1", "2"]
