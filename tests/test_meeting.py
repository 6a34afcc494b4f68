"""Who waits for all others says so, and gives up in the end."""

import dataclasses

import pytest

import jdaso
from jdaso._meeting import meet


class Barrier:
    """A request of a barrier, and the communicator that gives it; all come at a look."""

    def __init__(self, come_at):
        self.looks, self.come_at = 0, come_at

    def Ibarrier(self):
        return self

    def Test(self):
        self.looks += 1
        return self.looks >= self.come_at


def among_two(comm):
    topology = jdaso.discover_topology()
    other = topology.processes[0]._replace(rank=1, host="elsewhere")
    both = (topology.processes[0], other)
    return dataclasses.replace(topology, comm=comm, processes=both, heartbeat=None)


def test_who_finds_all_others_there_says_nothing(capsys):
    meet(among_two(Barrier(3)), "a place")
    meet(jdaso.discover_topology(), "a place")
    assert capsys.readouterr().err == ""


def test_who_waits_says_for_whom_and_gives_up(capsys):
    with pytest.raises(jdaso.JdasoError, match=r"waited 0.2 s .* at a place: rank 1 \(elsewhere\)"):
        meet(among_two(Barrier(10**9)), "a place", timeout=0.2)
    assert "waits for all others at a place" in capsys.readouterr().err
