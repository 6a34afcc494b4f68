"""Processes are assigned to nodes, or an error explains why they cannot be."""

import pytest

from jdaso import JdasoError, discover_topology
from jdaso.cluster.topology import Process, assign_nodes


def hosts(*processes_on_host, platform="gpu", devices=1):
    """Processes by rank, in the order of hosts, as a launcher places them by default."""
    processes = []
    for host, count in enumerate(processes_on_host):
        first = len(processes)
        for _ in range(count):
            processes.append(Process(len(processes), f"host{host}", first, platform, devices))
    return tuple(processes)


def test_a_process_alone_on_its_host_is_a_node():
    per_node, placements = assign_nodes(hosts(1, 1, 1, devices=4), None)
    assert per_node == 1
    assert [place.node for place in placements] == [0, 1, 2]


def joined(processes, size):
    """The processes, joined into programs of ``size`` consecutive ones."""
    return tuple(p._replace(program_size=size, program_index=p.rank % size) for p in processes)


@pytest.mark.parametrize(("devices", "per_node"), [(1, None), (4, None), (1, 4), (4, 4)])
def test_processes_of_a_host_that_are_not_joined_are_told_what_to_do(devices, per_node):
    """Each process sees its own device only, or all devices of the host."""
    advice = r"4 processes on host0 .* one process per node.*join_processes=True.*_per_node=1"
    with pytest.raises(JdasoError, match=advice):
        assign_nodes(hosts(4, 4, devices=devices), per_node)


def test_each_process_of_a_host_can_be_a_node():
    per_node, placements = assign_nodes(hosts(2, 2), 1)
    assert per_node == 1
    assert [place.node for place in placements] == [0, 1, 2, 3]


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("given", [None, 4])
def test_joined_processes_of_a_host_are_one_node(platform, given):
    per_node, placements = assign_nodes(joined(hosts(4, 4, platform=platform), 4), given)
    assert per_node == 4
    assert [tuple(place) for place in placements] == [(n, i) for n in range(2) for i in range(4)]


@pytest.mark.parametrize("devices", [1, 2])
def test_on_cpu_every_process_is_a_node(devices):
    per_node, placements = assign_nodes(hosts(3, platform="cpu", devices=devices), None)
    assert per_node == 1
    assert [place.node for place in placements] == [0, 1, 2]


def test_round_robin_ranks_are_grouped_by_host():
    processes = tuple(Process(r, f"host{r % 2}", r % 2, "gpu", 1, 2, r // 2) for r in range(4))
    _, placements = assign_nodes(processes, None)
    assert [place.node for place in placements] == [0, 1, 0, 1]
    assert [place.local_rank for place in placements] == [0, 0, 1, 1]


def test_processes_per_node_can_be_given():
    per_node, placements = assign_nodes(joined(hosts(4, 4), 2), 2)
    assert per_node == 2
    assert [place.node for place in placements] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_host_can_have_several_nodes_of_joined_processes():
    per_node, placements = assign_nodes(joined(hosts(4), 2), None)
    assert per_node == 2
    assert [place.local_rank for place in placements] == [0, 1, 0, 1]


def test_jax_program_of_several_nodes_is_an_error():
    with pytest.raises(JdasoError, match=r"rank 0 .* process 0 of 4.*\(join_processes=True\)"):
        assign_nodes(joined(hosts(2, 2), 4), None)


def test_unequal_numbers_of_processes_name_the_hosts():
    with pytest.raises(JdasoError, match=r"got 4 on host0, 3 on host1"):
        assign_nodes(hosts(4, 3), 4)


def test_unequal_numbers_of_devices_name_the_nodes():
    processes = (Process(0, "a", 0, "gpu", 4), Process(1, "b", 1, "gpu", 3))
    with pytest.raises(JdasoError, match=r"node 0 \(a\) has 4, node 1 \(b\) has 3"):
        assign_nodes(processes, None)


def test_a_node_that_fell_back_to_the_cpu_is_named():
    processes = (Process(0, "a", 0, "gpu", 1), Process(1, "b", 1, "cpu", 1))
    with pytest.raises(JdasoError, match=r"got gpu on a \(rank 0\), cpu on b \(rank 1\)"):
        assign_nodes(processes, None)


def test_joined_processes_with_several_devices_each_are_an_error():
    with pytest.raises(JdasoError, match=r"4 processes of node 0 \(host0\) have 2 devices each"):
        assign_nodes(joined(hosts(4, 4, devices=2), 4), None)


def test_no_processes_per_node_is_an_error():
    with pytest.raises(ValueError, match=r"processes_per_node must be .* >= 1, got 0"):
        discover_topology(0)


def test_without_a_launcher_there_is_one_node():
    topology = discover_topology()
    assert (topology.num_nodes, topology.node, topology.rank) == (1, 0, 0)
    assert topology.mesh.axis_names == ("local",)
    assert topology.heartbeat is None
    assert topology.states(frozenset({0})) == topology.describe(0)
    topology.follow()()
    with pytest.raises(SystemExit, match="the reason"):
        topology.abort("the reason")


def test_job_script_without_srun_causes_a_warning(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.warns(RuntimeWarning, match="only process of a Slurm job of 4 tasks"):
        discover_topology()
