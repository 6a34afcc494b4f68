"""Arguments that shared memory refuses before it calls MPI."""

import dataclasses

import numpy as np
import pytest

import jdaso
from jdaso.cluster.placement import Placement, Process
from jdaso.passm import server_group, shared_memory, simulated_memory

PARAMS = {"w": np.ones(3, "f4")}


def topology(*memory_group):
    """The topology of rank 0 with one process for each of these hosts."""
    processes = tuple(
        Process(rank, f"host{host}", host, "cpu", 1) for rank, host in enumerate(memory_group)
    )
    places = tuple(Placement(rank, 0) for rank in range(len(processes)))
    return dataclasses.replace(jdaso.discover_topology(), processes=processes, placements=places)


def test_processes_of_several_hosts_are_named():
    with pytest.raises(
        jdaso.JdasoError, match=r"rank 0 \(host0\) and rank 2 \(host2\), and 1 more"
    ):
        shared_memory(topology(0, 0, 2, 2), PARAMS)


@pytest.mark.parametrize("num_servers", [0, 2, 4, 1.5])
def test_every_server_has_as_many_slaves(num_servers):
    for ask in (
        lambda t: shared_memory(t, PARAMS, num_servers),
        lambda t: server_group(t, num_servers),
    ):
        with pytest.raises(ValueError, match="num_servers must"):
            ask(topology(0, 0, 0))


def test_a_group_names_the_ranks_among_all_processes():
    pytest.importorskip("mpi4py.MPI")
    group = server_group(topology(0, 0, 0, 0), 2)
    assert group.num_nodes == 2
    assert group.describe(1) == "rank 2 (host0)"


@pytest.mark.parametrize("timeout", [0, -1, float("inf")])
def test_a_time_out_is_positive(timeout):
    with pytest.raises(ValueError, match="timeout must be a finite number above 0"):
        shared_memory(topology(0), PARAMS, timeout=timeout)


@pytest.mark.parametrize("processes", [0, 1.5])
def test_simulated_processes_are_a_whole_number(processes):
    with pytest.raises(ValueError, match="processes must be a whole number"):
        simulated_memory(PARAMS, processes)


def test_first_values_are_copied():
    params = {"w": np.ones(3, "f4"), "count": np.int32(2)}
    memory = simulated_memory(params)[0]
    memory.add(0, {1: np.ones(3)}, True)
    np.testing.assert_array_equal(params["w"], np.ones(3))
    np.testing.assert_array_equal(memory.read()["w"], np.full(3, 2))
