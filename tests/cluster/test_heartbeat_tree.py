"""The tree of heartbeats: bounded, connected, and within hosts as far as possible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdaso.cluster import heartbeat_tree
from jdaso.cluster.heartbeat_tree import ancestors, connected, parents, without


def groups(hosts):
    """For each rank, the smallest rank of its host."""
    return np.array([hosts.index(host) for host in hosts])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=200), st.integers(1, 4))
def test_every_process_reaches_the_first_one_and_has_few_that_report_to_it(hosts, group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat_tree, "GROUP", group)
        found = parents(groups(hosts))
    assert found[0] == 0
    assert connected(found, 0, [], []).all()
    assert np.bincount(found).max() <= 2 * group + 1  # and rank 0 itself
    leaves = [rank for rank in range(1, len(hosts)) if hosts[found[rank]] != hosts[rank]]
    assert len(leaves) == len(set(hosts)) - 1  # one connection to each other host


@given(st.lists(st.integers(0, 9), min_size=1, max_size=50), st.integers(1, 4), st.data())
def test_without_some_ranks_each_reports_to_the_next_above_or_to_the_lowest(hosts, group, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeat_tree, "GROUP", group)
        found = parents(groups(hosts))
    ranks = range(len(hosts))
    gone = data.draw(st.sets(st.sampled_from(ranks), max_size=len(hosts) - 1))
    left = [rank for rank in ranks if rank not in gone]
    repaired = without(found, gone)
    for rank in left:
        above = [other for other in ancestors(found, rank) if other not in gone]
        assert repaired[rank] == (above or left)[0]
        assert repaired[rank] < rank or rank == left[0]
    assert connected(repaired, left[0], [], gone)[left].all()


def test_thousands_of_nodes_are_a_few_levels():
    found = parents(8 * (np.arange(8 * 8192) // 8))
    top, levels = found, 1
    while top.any():
        top, levels = found[top], levels + 1
    assert levels == 4
    assert np.bincount(found).max() <= 2 * heartbeat_tree.GROUP + 1


@given(st.lists(st.integers(0, 5), min_size=2, max_size=30), st.data())
def test_connected_are_those_that_a_message_reaches(hosts, data):
    found = parents(groups(hosts))
    ranks = st.integers(0, len(hosts) - 1)
    rank, gone = data.draw(ranks), data.draw(st.sets(ranks, max_size=3))
    unconnected = data.draw(st.sets(ranks, max_size=3))
    reached, new = {rank}, [rank]
    while new:
        new = [
            other
            for other in range(len(hosts))
            for low, high in ((rank, found[rank]), *((r, found[r]) for r in range(len(hosts))))
            if other not in reached
            and low not in unconnected
            and not {low, high} & gone
            and ((low == other and high in reached) or (high == other and low in reached))
        ]
        reached |= set(new)
    assert set(np.flatnonzero(connected(found, rank, unconnected, gone))) == reached
