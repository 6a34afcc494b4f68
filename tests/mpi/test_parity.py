"""The same transformation gives the same numbers on a virtual cluster, a mesh, and over MPI."""

import pytest
from launch import mpiexec, passes

# Programs that compile in half the time; rounding differs less, if at all.
QUICK = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


@pytest.mark.parametrize("processes", [2, 3])
def test_mpi_equals_virtual_cluster(processes):
    passes(mpiexec(processes, "parity.py"))


def test_mpi_with_two_devices_per_node_equals_virtual_cluster():
    passes(mpiexec(2, "parity.py", "--devices", 2))


def test_one_process_per_device_equals_virtual_cluster():
    passes(mpiexec(4, "parity.py", "--processes-per-node", 2))


def test_chunks_smaller_than_a_leaf_change_nothing():
    passes(mpiexec(3, "parity.py", "--chunk-bytes", 16))


def test_every_algorithm_over_mpi_equals_virtual_cluster():
    passes(mpiexec(2, "parity.py", "--algorithms", "all", **QUICK))


def test_a_node_that_is_not_finite_is_left_out_over_mpi_as_on_a_virtual_cluster():
    names = ["dasgd int8", "easgd", "diloco", "allreduce_gradients"]
    ended = mpiexec(3, "parity.py", "--bad", "--algorithms", *names, **QUICK)
    passes(ended)
    assert ") is left out of exchange" in ended.output


def test_many_fragments_in_flight_at_once_do_not_meet():
    """Of two devices per node, so that they take turns on two communicators, in small chunks."""
    options = ("--devices", 2, "--chunk-bytes", 16, "--dtypes", "float32", "float64")
    passes(mpiexec(3, "parity.py", "--algorithms", "all in flight", *options, **QUICK))


def test_mixed_dtypes_cross_in_one_tree():
    dtypes = ("float32", "bfloat16", "float16", "float64")
    # XLA keeps more bits than bfloat16 has where it fuses operations, and it fuses those of the
    # virtual cluster in another way: that is the optimizer's rounding, not the exchange's.
    flags = "--xla_allow_excess_precision=false"
    passes(mpiexec(2, "parity.py", "--dtypes", *dtypes, XLA_FLAGS=flags))


def test_float16_wire():
    passes(mpiexec(3, "parity.py", "--wires", "float16", "float16"))


@pytest.mark.parametrize(
    "options",
    [(2, "--wires", "int8", "bfloat16"), (3, "--wires", "int8", "int8", "--chunk-bytes", 16)],
)
def test_int8_wire(options):
    """A virtual cluster rounds what MPI rounds, and who adds up does not depend on the chunks."""
    passes(mpiexec(options[0], "parity.py", *options[1:]))


def test_mpi4jax_equals_virtual_cluster_with_a_delay():
    passes(mpiexec(2, "parity.py", "--exchange", "mpi4jax"))


def test_mpi4jax_equals_mpi_bit_for_bit_at_delay_0():
    passes(mpiexec(3, "mpi4jax_equals_mpi.py"))


def test_mesh_equals_virtual_cluster_for_every_algorithm():
    passes(mpiexec(1, "mesh.py", **QUICK))


def test_update_inside_shard_map_equals_update_outside():
    passes(mpiexec(2, "inside_shard_map.py"))


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_bytes_on_the_wire_are_the_fewest_that_an_all_reduce_needs(wire):
    passes(mpiexec(3, "wire_bytes.py", wire))


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("processes", "pattern"), [(3, "ring"), (4, "halving")])
def test_bytes_of_every_pattern_are_as_few(processes, pattern, wire):
    passes(mpiexec(processes, "wire_bytes.py", wire, "--pattern", pattern))


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_all_processes_of_a_node_send_the_same_share(wire):
    options = ("--senders", "all", "--processes-per-node", 2)
    passes(mpiexec(4, "wire_bytes.py", wire, *options))


@pytest.mark.parametrize(
    "options",
    [
        (4, "--processes-per-node", 2, "--wires", "int8", "bfloat16"),
        (2, "--devices", 2, "--chunk-bytes", 16),
        (3, "--devices", 2, "--algorithms", "all in flight", "--dtypes", "float32", "float64"),
    ],
)
def test_who_sends_changes_nothing(options):
    passes(mpiexec(options[0], "parity.py", "--senders", "all", *options[1:], **QUICK))


@pytest.mark.parametrize(("processes", "pattern"), [(3, "ring"), (4, "halving")])
def test_patterns_equal_the_virtual_cluster_but_for_the_order_of_adding(processes, pattern):
    options = ("--pattern", pattern, "--wires", "float32", "float32")
    passes(mpiexec(processes, "parity.py", *options, **QUICK))


def test_two_nodes_of_two_devices_equal_one_large_batch():
    passes(mpiexec(2, "data_parallel.py", "--devices", 2))


def test_processes_of_a_node_average_their_gradients():
    passes(mpiexec(4, "data_parallel.py", "--devices", 1, "--processes-per-node", 2))


def test_consensus_and_broadcast_of_replicated_trees():
    passes(mpiexec(2, "collectives.py"))


def test_the_local_index_rotates_with_every_exchange():
    passes(mpiexec(2, "rotation.py"))
