"""Parameters that are sharded over the devices of a node: the same numbers, and no gather."""

import pytest
from launch import Batch, mpiexec, passes

import jdaso

# Each of these compiles another program for a shard: fragments, blocks of int8, two trees, moments.
FEW = ("daso", "dasgd fragments", "dasgd int8", "diloco", "moments int8")
# Joined processes compile no more than a few others.
MORE = ("easgd", "local_sgd", "local_sgd delta", "allreduce_gradients", "bad and drained")
WIRES = ("bfloat16", "int8")


def test_layouts():
    passes(mpiexec(1, "layouts.py"))


def test_a_program_whose_mesh_has_other_axes_is_refused_by_name():
    passes(mpiexec(2, "other_mesh.py"))


@pytest.fixture(scope="module")
def every_algorithm(tmp_path_factory):
    """How a run on two devices per process has ended, and the folder of its bits."""
    folder = tmp_path_factory.mktemp("bits")
    return mpiexec(2, "sharded.py", 2, "--bits", folder, timeout=600), folder


def test_every_algorithm_on_two_devices(every_algorithm):
    passes(every_algorithm[0])


def test_joined_processes_reach_the_bits_of_one_process_with_several_devices(every_algorithm):
    ended, folder = every_algorithm
    passes(ended)
    arguments = (*FEW, *MORE, "--joined", "--bits", folder)
    passes(mpiexec(4, "sharded.py", 2, *arguments, timeout=600))


def test_a_mesh_of_two_axes(every_algorithm):
    """With the results of virtual clusters that the first run has kept."""
    passes(mpiexec(2, "sharded.py", 4, *FEW, "--bits", every_algorithm[1]))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Jobs of processes with 2, 1 and 4 devices. The first one saves, and restores as well."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def run(wire, devices):
        return "sharded_checkpoint.py", folder / wire, devices, wire

    first = {f"{wire} {what}": run(wire, 2) for wire in WIRES for what in ("saved", "restored")}
    others = [{f"{wire} restored": run(wire, devices) for wire in WIRES} for devices in (1, 4)]
    return [Batch(2, children) for children in (first, *others)]


@pytest.mark.parametrize("wire", WIRES)
def test_a_checkpoint_in_flight_is_restored_on_another_number_of_devices(checkpoints, wire):
    for job in checkpoints:
        assert "rank 0 restored" in job.passes(f"{wire} restored")


def test_a_checkpoint_of_joined_processes_is_restored_by_them_and_by_others(tmp_path):
    run = "sharded_checkpoint.py", tmp_path
    joined = Batch(4, dict.fromkeys(("saved", "restored"), (*run, 2, "int8", "joined")))
    assert "rank 0 restored" in joined.passes("restored")
    passes(mpiexec(2, *run, 1, "int8"))


@pytest.mark.parametrize("dead", [0, 1])
def test_a_joined_process_that_dies_ends_the_job(dead):
    ended = mpiexec(4, "death.py", "killed joined", dead, deaths_are_noticed=False)
    # JAX ends the other processes of a node whose first one has died, with status 134, and the
    # launcher may report the first status that it sees.
    statuses = (jdaso.cluster.EXIT_NODE_LOST, *(() if dead else (9, 134, 137)))
    assert ended.returncode in statuses, ended.output
    assert f"rank {dead} (" in ended.output
    assert "has died" in ended.output
