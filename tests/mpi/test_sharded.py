"""Parameters that are sharded over the devices of a node: the same numbers, and no gather."""

import pytest
from launch import mpiexec, passes

import jdaso

# Each of these compiles another program for a shard: fragments, blocks of int8, two trees, moments.
FEW = ("daso", "dasgd fragments", "dasgd int8", "diloco", "moments average")
# Joined processes compile no more than a few others, whose bits need no comparison.
MORE = ("easgd", "local_sgd", "local_sgd delta", "allreduce_gradients", "bad and drained")


def test_layouts():
    passes(mpiexec(1, "layouts.py"))


def test_every_algorithm_on_two_devices():
    passes(mpiexec(2, "sharded.py", 2))


def test_joined_processes_reach_the_bits_of_one_process_with_several_devices(tmp_path):
    for processes, more in ((2, ()), (4, (*MORE, "--joined"))):
        passes(mpiexec(processes, "sharded.py", 2, *FEW, *more, "--bits", tmp_path, timeout=300))
    saved = {*FEW, "easgd"} - {"dasgd int8"}
    names = {f"{name} {node}.npz" for name in saved for node in range(2)}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_a_mesh_of_two_axes():
    passes(mpiexec(2, "sharded.py", 4, *FEW))


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_checkpoint_in_flight_is_restored_on_another_number_of_devices(tmp_path, wire):
    for devices in (2, 2, 1, 4):
        passes(mpiexec(2, "sharded_checkpoint.py", tmp_path, devices, wire))


def test_a_checkpoint_of_joined_processes_is_restored_by_them_and_by_others(tmp_path):
    for processes, *more in ((4, 2, "int8", "joined"), (4, 2, "int8", "joined"), (2, 1, "int8")):
        passes(mpiexec(processes, "sharded_checkpoint.py", tmp_path, *more))


@pytest.mark.parametrize("dead", [0, 1])
def test_a_joined_process_that_dies_ends_the_job(dead):
    ended = mpiexec(4, "death.py", "killed joined", dead, deaths_are_noticed=False)
    # JAX ends the other processes of a node whose first one has died, with status 134, and the
    # launcher may report the first status that it sees.
    statuses = (jdaso.cluster.EXIT_NODE_LOST, *(() if dead else (9, 134, 137)))
    assert ended.returncode in statuses, ended.output
    assert f"rank {dead} (" in ended.output
    assert "has died" in ended.output
