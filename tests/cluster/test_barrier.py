"""The barrier logs whom it waits for, and it times out."""

import dataclasses

import pytest

import jdaso
from jdaso.cluster.barrier import barrier


class Comm:
    """A communicator and the request of its barrier, which completes at the n-th test."""

    def __init__(self, complete_at):
        self.tests, self.complete_at = 0, complete_at

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
    barrier(two_processes(Comm(3)), "a test")
    barrier(jdaso.discover_topology(), "a test")
    assert caplog.text == ""


def test_a_long_wait_is_logged_and_times_out(caplog):
    match = r"waited 0.2 s .* at the barrier for a test: rank 1 \(elsewhere\)"
    with pytest.raises(jdaso.JdasoError, match=match):
        barrier(two_processes(Comm(10**9)), "a test", timeout=0.2)
    assert "waiting for all other processes at the barrier for a test" in caplog.text
