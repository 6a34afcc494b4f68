"""The same transformation gives the same numbers on a virtual cluster, a mesh, and over MPI."""

import os

import pytest
from launch import Batch, mpiexec, passes

LATE = ("--algorithms", "daso", "local_sgd delta")
TWO = Batch(
    2,
    {
        "one device": ("parity.py",),
        "every algorithm": ("parity.py", "--algorithms", "all", "--in-place"),
        "int8 and bfloat16": ("parity.py", "--wires", "int8", "bfloat16"),
        "mpi4jax with a delay": ("parity.py", "--exchange", "mpi4jax", *LATE),
    },
)
TWO_OF_TWO_DEVICES = Batch(
    2,
    {
        "two devices": ("parity.py", "--devices", 2),
        "chunks smaller than a leaf": ("parity.py", "--devices", 2, "--chunk-bytes", 16),
        "update inside shard_map": ("inside_shard_map.py",),
        "large arrays bit for bit": ("rounding.py",),
        "consensus and broadcast": ("collectives.py",),
        "one large batch": ("data_parallel.py", "--devices", 2),
    },
)
# XLA keeps more bits than bfloat16 has where it fuses operations, and it fuses those of the
# virtual cluster in another way: that is the optimizer's rounding, not the exchange's.
MIXED = ("--dtypes", "float32", "bfloat16", "float16", "float64")
NOT_FINITE = ("dasgd int8", "easgd", "diloco", "allreduce_gradients", "local_sgd delta")
THREE = Batch(
    3,
    {
        "chunks smaller than a leaf": ("parity.py", "--chunk-bytes", 16),
        "float16": ("parity.py", "--wires", "float16", "float16"),
        "float4 and int8": ("parity.py", "--wires", "float4", "int8", "--chunk-bytes", 16),
        "mpi4jax bit for bit": ("mpi4jax_equals_mpi.py",),
        "a node that is not finite": ("parity.py", "--bad", "--algorithms", *NOT_FINITE),
        **{
            f"bytes of {wire}": ("wire_bytes.py", wire)
            for wire in ("float32", "bfloat16", "float16", "int8", "float4")
        },
    },
)


@pytest.mark.parametrize("case", TWO.names)
def test_two_nodes(case):
    TWO.passes(case)


@pytest.mark.parametrize("case", TWO_OF_TWO_DEVICES.names)
def test_two_nodes_of_two_devices(case):
    TWO_OF_TWO_DEVICES.passes(case)


@pytest.mark.parametrize("case", THREE.names)
def test_three_nodes(case):
    output = THREE.passes(case)
    if case == "a node that is not finite":
        assert ") is left out of exchange" in output


def test_many_fragments_in_flight_take_turns_on_two_communicators():
    in_flight = ("--algorithms", "all in flight", "--dtypes", "float32", "float64")
    passes(mpiexec(3, "parity.py", "--devices", 2, *in_flight, "--chunk-bytes", 16))


def test_joined_processes_train_on_one_large_batch():
    passes(mpiexec(4, "data_parallel.py", "--joined"))


def test_mixed_dtypes_cross_in_one_tree():
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
    passes(mpiexec(2, "parity.py", *MIXED, XLA_FLAGS=flags, **optimized))


def test_mesh_equals_virtual_cluster_for_every_algorithm():
    passes(mpiexec(1, "mesh.py"))


def test_mesh_rounds_large_arrays_as_the_virtual_cluster_does():
    passes(mpiexec(1, "rounding.py"))


def test_the_local_index_rotates_with_every_exchange():
    passes(mpiexec(2, "rotation.py"))
