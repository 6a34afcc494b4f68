"""The barrier logs whom it waits for, and it times out."""

import dataclasses

import pytest

import jdaso
from jdaso.cluster.heartbeat import Heartbeat


class Comm:
    """A communicator and the request of its barrier, which completes at the n-th test."""

    def __init__(self, complete_at, size=2):
        self.tests, self.complete_at, self.size = 0, complete_at, size

    def Get_rank(self):
        return 0

    def Get_size(self):
        return self.size

    def Ibarrier(self):
        return self

    def Test(self):
        self.tests += 1
        return self.tests >= self.complete_at


def two_processes(comm):
    topology = jdaso.discover_topology()
    other = topology.processes[0]._replace(rank=1, host="elsewhere")
    both = (topology.processes[0], other)
    return dataclasses.replace(topology, comm=comm, processes=both, heartbeat=None)


def test_a_short_wait_logs_nothing(caplog):
    two_processes(Comm(3)).group.barrier("a test")
    jdaso.discover_topology().group.barrier("a test")
    assert caplog.text == ""


def test_a_few_of_many_processes_are_named():
    topology = two_processes(Comm(10**9, size=5000))
    processes = tuple(topology.processes[0]._replace(rank=rank) for rank in range(5000))
    heartbeat = Heartbeat(0, 5000, "rank {}".format, abort=lambda *_: None)
    many = dataclasses.replace(topology, processes=processes, heartbeat=heartbeat)
    with pytest.raises(
        jdaso.JdasoError, match=r"test: rank 1, .* rank 8 and 4991 more \("
    ) as error:
        many.group.barrier("a test", timeout=0.1)
    assert len(str(error.value)) < 1000


def test_a_long_wait_is_logged_and_times_out(caplog):
    match = r"waited 0.2 s .* at the barrier for a test: rank 1 \(elsewhere\)"
    with pytest.raises(jdaso.JdasoError, match=match):
        two_processes(Comm(10**9)).group.barrier("a test", timeout=0.2)
    assert "waiting for all other processes at the barrier for a test" in caplog.text
