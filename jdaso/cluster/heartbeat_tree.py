"""The tree of processes in which heartbeats travel."""

from collections.abc import Collection

import numpy as np

# The most processes of its own host that report to one process, and the most first processes of
# other hosts that do.
GROUP = 32


def parents(memory_groups: np.ndarray) -> np.ndarray:
    """The rank to which each rank reports, which is lower. Rank 0 reports to itself.

    The first process of each host reports to that of another host, and the others within their
    host. No process has more than ``2 GROUP`` others that report to it.

    Args:
        memory_groups: For each rank, the smallest rank of its host, int[P].

    >>> parents(np.array([0, 0, 0, 3, 3, 5]))
    array([0, 0, 0, 0, 3, 0])
    """
    first_ranks, hosts = np.unique(memory_groups, return_inverse=True)
    order = np.argsort(hosts, kind="stable")  # all ranks, host by host
    first_places = np.searchsorted(hosts[order], np.arange(len(first_ranks)))
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    local = places - first_places[hosts]
    within = order[first_places[hosts] + np.maximum(local - 1, 0) // GROUP]
    between = first_ranks[np.maximum(hosts - 1, 0) // GROUP]
    return np.where(local > 0, within, between)


def ancestors(tree: np.ndarray, rank: int) -> list[int]:
    """The ranks above a rank, the nearest first.

    >>> ancestors(np.array([0, 0, 1, 2]), 3)
    [2, 1, 0]
    """
    above: list[int] = []
    while (parent := int(tree[rank])) != rank:
        above, rank = [*above, parent], parent
    return above


def without(tree: np.ndarray, gone: Collection[int]) -> np.ndarray:
    """The tree in which no rank reports to one of ``gone``.

    A rank that reported to one of them reports to its nearest remaining ancestor, or, if there is
    none, to the lowest remaining rank.

    >>> without(np.array([0, 0, 1, 1, 0]), [1]), without(np.array([0, 0, 1, 1, 0]), [0])
    (array([0, 0, 0, 0, 0]), array([1, 1, 1, 1, 1]))
    """
    ranks, lost = np.arange(len(tree)), np.isin(np.arange(len(tree)), [*gone])
    tree = np.where(lost & (tree == ranks), np.argmin(lost), tree)
    while lost[tree].any():
        tree = np.where(lost[tree], tree[tree], tree)
    return tree


def connected(
    tree: np.ndarray, rank: int, unconnected: Collection[int], gone: Collection[int]
) -> np.ndarray:
    """For each rank, whether messages travel between it and ``rank``, bool[P].

    Args:
        tree: The result of :func:`parents`.
        unconnected: Ranks without a connection to their parents.
        gone: Ranks that neither send nor forward messages.

    >>> connected(np.array([0, 0, 0, 1, 3]), 0, unconnected=[], gone=[3])
    array([ True,  True,  True, False, False])
    """
    cut = np.isin(tree, list(gone))
    cut[[*unconnected, *gone]] = True
    top = np.where(cut, np.arange(len(tree)), tree)
    while (top[top] != top).any():
        top = top[top]
    return top == top[rank]
