"""Arguments that shared memory refuses before it calls MPI."""

import dataclasses

import numpy as np
import pytest

import jdaso
from jdaso.cluster.topology import Placement, Process
from jdaso.passm import server_group, settled, shared_memory, simulated_memory

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
    with pytest.raises(ValueError, match="processes must be an integer"):
        simulated_memory(PARAMS, processes)


@pytest.mark.parametrize("name", ["max_delay", "seed"])
def test_delays_are_whole_numbers(name):
    for value in (-1, 1.5):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 0"):
            simulated_memory(PARAMS, 2, **{name: value})


def versions_read(max_delay, seed=0, writes=60):
    """How many writes each number of a read is behind: the k-th version is k everywhere."""
    memories = simulated_memory(
        {"a": np.zeros((50, 4), "f4"), "b": np.float32(0)}, 2, max_delay, seed
    )
    delays = []
    for k in range(1, writes + 1):
        memories[k % 2].add({0: {0: np.ones((50, 4)), 1: 1.0}}, True)
        read = memories[0].read()
        delays.append(k - np.append(read["a"], read["b"]))
    return memories, np.array(delays)


def test_reads_mix_versions_that_are_at_most_max_delay_writes_old():
    _, delays = versions_read(max_delay=3)
    assert set(np.unique(delays)) == {0, 1, 2, 3}
    assert all(len(set(read)) > 1 for read in delays)
    assert set(delays[:, -1]) == {0, 1, 2, 3}  # a scalar too
    np.testing.assert_allclose(
        np.bincount(delays[3:].astype(int).ravel()) / delays[3:].size, 0.25, atol=0.02
    )


def test_delays_repeat_with_the_seed():
    first = versions_read(5)[1]
    np.testing.assert_array_equal(first, versions_read(5)[1])
    assert (first != versions_read(5, seed=1)[1]).any()
    assert not versions_read(0)[1].any()


@pytest.mark.parametrize("wait", [lambda memory: memory.barrier(), settled])
def test_after_a_barrier_all_processes_read_what_was_written_before(wait):
    memories, _ = versions_read(max_delay=5)
    wait(memories[1])
    for memory in memories:
        np.testing.assert_array_equal(memory.read()["a"], np.full((50, 4), 60))


def test_without_delays_the_numbers_are_those_of_adding_in_place():
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(50, 1000)).astype("f4")
    memories, place = simulated_memory({"w": updates[0]}, 3, max_delay=0), updates[0].copy()
    for k, update in enumerate(updates):
        place += update
        memories[k % 3].add({0: {0: update}}, False)
        np.testing.assert_array_equal(memories[-k % 3].read()["w"], place)


def test_first_values_are_copied():
    params = {"w": np.ones(3, "f4"), "count": np.int32(2)}
    memory = simulated_memory(params)[0]
    memory.add({0: {1: np.ones(3)}}, True)
    np.testing.assert_array_equal(params["w"], np.ones(3))
    np.testing.assert_array_equal(memory.read()["w"], np.full(3, 2))
