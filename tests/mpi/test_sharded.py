"""Parameters that are sharded over the devices of a node: the same numbers, and no gather."""

import pytest
from launch import mpiexec, passes

# Each of these compiles another program for a shard: fragments, blocks of int8, two trees, moments.
FEW = ("daso", "dasgd fragments", "dasgd int8", "diloco", "moments average")


def test_layouts():
    passes(mpiexec(1, "layouts.py"))


def test_every_algorithm_on_two_devices():
    passes(mpiexec(2, "sharded.py", 2))


def test_a_mesh_of_two_axes():
    passes(mpiexec(2, "sharded.py", 4, *FEW))


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_a_checkpoint_in_flight_is_restored_on_another_number_of_devices(tmp_path, wire):
    for devices in (2, 2, 1, 4):
        passes(mpiexec(2, "sharded_checkpoint.py", tmp_path, devices, wire))
