"""Saved in flight and restored, bit for bit; on another number of nodes, from the mean."""

import os
import re
import shutil

import pytest
from launch import Batch, mpiexec, passes

import jdaso
from jdaso.checkpoint import folder

# Step -> algorithms that are saved at it.
SAVED_AT = {
    13: ["daso", "easgd", "dasgd int8", "local_sgd delta"],
    14: ["dasgd fragments", "moments average", "moments int8"],
}
# Folder -> the wire of a run that two nodes save.
RUNS = {"for three": "int8", "for one": "float32", "to be damaged": "float32"}

REFUSED = {
    "one of two": "pass all exchanges of this process, Checkpoints(folder, topology, [first",
    "earlier state": "Save the state that the last step returned",
    "other moments": "exchange 1, in flight, has 3 leaves, the state sends 6",
    "other fragments": "fragments.1.age is not in the checkpoint",
    "other bits": "exchange 0 has block_bits of 4, 1.1.averaging.fragments.0 of 0",
    "other order": "pass the exchanges in the same order as when it was saved",
}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of two nodes that saves, and restores what it can; and its folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    children = {
        str(step): ("checkpoint.py", folder / str(step), step, *algorithms)
        for step, algorithms in SAVED_AT.items()
    }
    children |= {
        name: ("other_nodes.py", "save", folder / name, 2, wire) for name, wire in RUNS.items()
    }
    children["two exchanges"] = ("flights.py", folder / "two exchanges", "two")
    return Batch(2, children), folder


@pytest.mark.parametrize("saved_at", SAVED_AT)
def test_resumed_run_ends_with_the_same_bits(job, saved_at):
    output = job[0].passes(str(saved_at))
    for name in SAVED_AT[saved_at]:
        in_flight = 3 if name == "dasgd fragments" else 1
        for rank in range(2):
            assert f"rank {rank}: {name} passed, {in_flight} in flight" in output


@pytest.mark.parametrize(("nodes", "name"), [(3, "for three"), (1, "for one")])
def test_other_number_of_nodes_goes_on_from_the_mean(job, nodes, name):
    batch, folder = job
    batch.passes(name)
    passes(mpiexec(nodes, "other_nodes.py", "restore", folder / name, 2, RUNS[name]))


def test_training_goes_on_with_fewer_nodes_and_then_with_more(tmp_path):
    jobs = [3, 2, 3]
    for end in range(1, len(jobs) + 1):
        passes(mpiexec(jobs[end - 1], "going_on.py", tmp_path, *jobs[:end]))


def test_parts_of_two_jobs_are_refused(job, tmp_path):
    batch, folder = job
    for node, name in enumerate(["to be damaged", "for one"]):
        batch.passes(name)
        (part,) = (folder / name).glob(f"*/node_{node}_of_2")
        shutil.copytree(part, tmp_path / part.parent.name / part.name)
    ended = mpiexec(2, "other_nodes.py", "restore", tmp_path, 2, "float32")
    assert ended.returncode != 0
    assert re.search(r"is skipped: .*_step_4 has parts of 2 jobs, which wrote", ended.output)


def test_a_job_that_writes_to_the_folder_of_another_is_refused_on_all_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "RENEW_SECONDS", 0.1)
    first = folder.FolderLock(tmp_path, 1)
    first.acquire()
    ended = mpiexec(2, "other_nodes.py", "save", tmp_path, 2, "float32")
    first.release()
    assert ended.returncode != 0
    refused = rf"JdasoError: rank 0 \(.*\): another job writes to .* process {os.getpid()} on "
    assert len(re.findall(refused, ended.output)) >= 1, ended.output
    assert not list(tmp_path.iterdir())


def test_a_part_that_one_node_cannot_read_is_named_by_all(job):
    batch, folder = job
    batch.passes("to be damaged")
    (manifest,) = (folder / "to be damaged").glob("*/node_1_of_2/manifest.ocdbt")
    manifest.write_bytes(b"nothing")
    for nodes in (2, 1):  # each its own; the first reads all
        ended = mpiexec(nodes, "other_nodes.py", "restore", folder / "to be damaged", 2, "float32")
        assert ended.returncode != 0
        message = rf"rank {nodes - 1} \(.*\): {manifest.parent} cannot be read; it is damaged"
        # Of the line that is printed at once: orbax's threads print between those of a traceback.
        assert re.search(f"is skipped: {message}", ended.output), ended.output


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """A job whose checkpoints do not hold, or do not fit, what is in flight."""
    folder = tmp_path_factory.mktemp("flights")
    children = {case: ("flights.py", folder / case.replace(" ", "_"), case) for case in REFUSED}
    return Batch(2, children, raises=True)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_in_flight_must_be_what_the_state_waits_for(refused, case):
    assert REFUSED[case] in refused.raised(case)


def test_two_exchanges_resume_with_the_same_bits(job):
    job[0].passes("two exchanges")


def test_signal_that_one_node_hears_stops_all_at_the_same_step():
    ended = mpiexec(3, "interrupted.py")
    assert ended.returncode == jdaso.cluster.EXIT_TRY_AGAIN, ended.output
    assert sorted(re.findall(r"rank (\d) passed", ended.output)) == ["0", "1", "2"]
