"""Processes find their nodes, or say why they cannot."""

import pytest

from jdaso import JdasoError, discover_topology
from jdaso._layout import Process, arrange


def hosts(*processes_on_host, platform="gpu", devices=1):
    """Processes by rank, host after host, as a launcher places them by default."""
    processes = []
    for host, count in enumerate(processes_on_host):
        first = len(processes)
        for _ in range(count):
            processes.append(Process(len(processes), f"host{host}", first, platform, devices))
    return tuple(processes)


def test_a_process_alone_on_its_host_is_a_node():
    per_node, places = arrange(hosts(1, 1, 1, devices=4), None)
    assert per_node == 1
    assert [place.node for place in places] == [0, 1, 2]


@pytest.mark.parametrize("devices", [1, 4])
def test_processes_that_share_a_host_with_accelerators_are_one_node(devices):
    """Whether each sees its own device only, or all of the host."""
    per_node, places = arrange(hosts(4, 4, devices=devices), None)
    assert per_node == 4
    assert [tuple(place) for place in places] == [(n, i) for n in range(2) for i in range(4)]


@pytest.mark.parametrize("devices", [1, 2])
def test_on_cpu_every_process_is_a_node(devices):
    per_node, places = arrange(hosts(3, platform="cpu", devices=devices), None)
    assert per_node == 1
    assert [place.node for place in places] == [0, 1, 2]


def test_ranks_dealt_out_round_robin_are_grouped_by_host():
    processes = tuple(Process(r, f"host{r % 2}", r % 2, "gpu", 1) for r in range(4))
    _, places = arrange(processes, None)
    assert [place.node for place in places] == [0, 1, 0, 1]
    assert [place.local_rank for place in places] == [0, 0, 1, 1]


def test_processes_per_node_can_be_said():
    per_node, places = arrange(hosts(4, 4), 2)
    assert per_node == 2
    assert [place.node for place in places] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_unequal_numbers_of_processes_name_the_hosts():
    with pytest.raises(JdasoError, match=r"there are 4 on host0, 3 on host1"):
        arrange(hosts(4, 3), None)


def test_unequal_numbers_of_devices_name_the_nodes():
    processes = (Process(0, "a", 0, "gpu", 4), Process(1, "b", 1, "gpu", 3))
    with pytest.raises(JdasoError, match=r"node 0 \(a\) 4, node 1 \(b\) 3"):
        arrange(processes, None)


def test_a_node_that_has_fallen_back_to_the_cpu_is_named():
    processes = (Process(0, "a", 0, "gpu", 1), Process(1, "b", 1, "cpu", 1))
    with pytest.raises(JdasoError, match=r"a \(rank 0\) has gpu, b \(rank 1\) has cpu"):
        arrange(processes, None)


def test_more_ranks_than_devices_is_an_error():
    with pytest.raises(JdasoError, match="more ranks than devices: 4 processes of node 0"):
        arrange(hosts(4, 4, devices=2), None)


def test_more_devices_than_ranks_is_an_error():
    with pytest.raises(JdasoError, match="more devices than ranks"):
        arrange(hosts(2, 2, devices=4), None)


def test_no_processes_per_node_is_an_error():
    with pytest.raises(ValueError, match="processes_per_node must be at least 1, got 0"):
        arrange(hosts(2), 0)


def test_without_a_launcher_there_is_one_node():
    topology = discover_topology()
    assert (topology.num_nodes, topology.node, topology.rank) == (1, 0, 0)
    assert topology.mesh.axis_names == ("local",)
    assert topology.heartbeat is None
    assert topology.states(frozenset({0})) == topology.describe(0)
    with pytest.raises(SystemExit, match="the reason"):
        topology.end_all("the reason")


def test_job_script_that_forgot_srun_is_warned_of(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.warns(RuntimeWarning, match="only process of a Slurm job of 4 tasks"):
        discover_topology()
