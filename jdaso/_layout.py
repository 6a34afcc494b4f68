"""Which processes make a node: a pure function of what all processes told of themselves."""

from __future__ import annotations

from typing import NamedTuple

from jdaso._base import JdasoError


class Process(NamedTuple):
    """What a process tells the others of itself."""

    rank: int
    host: str
    shared_with: int  # smallest rank among the processes that share this one's memory
    platform: str
    num_devices: int


class Place(NamedTuple):
    """Where a process stands: its node, and its index among the node's processes."""

    node: int
    local_rank: int


def arrange(
    processes: tuple[Process, ...], processes_per_node: int | None
) -> tuple[int, tuple[Place, ...]]:
    """Assigns processes to nodes; a pure function, so every process finds the same.

    Args:
        processes: all of them, by rank.
        processes_per_node: as in :func:`discover_topology`.

    Returns:
        Processes per node, and the place of each process.

    Raises:
        JdasoError: if processes and devices do not match, naming the hosts.
    """
    hosts: dict[int, list[Process]] = {}
    for process in processes:
        hosts.setdefault(process.shared_with, []).append(process)
    groups = list(hosts.values())
    if processes_per_node is None:
        on_cpu = all(process.platform == "cpu" for process in processes)
        per_node = 1 if on_cpu else max(len(group) for group in groups)
    else:
        per_node = processes_per_node
    if per_node < 1:
        raise ValueError(f"processes_per_node must be at least 1, got {processes_per_node}.")
    uneven = [group for group in groups if len(group) % per_node]
    if uneven:
        raise JdasoError(
            f"cannot make nodes of {per_node} processes each: there are "
            + _listed(f"{len(group)} on {group[0].host}" for group in groups)
            + ". Start the same number on every host, or say processes_per_node=1 to make each "
            "process a node."
        )
    nodes = [
        group[first : first + per_node]
        for group in groups
        for first in range(0, len(group), per_node)
    ]
    _check_devices(nodes, per_node)
    places = {
        process.rank: Place(node, local_rank)
        for node, members in enumerate(nodes)
        for local_rank, process in enumerate(members)
    }
    return per_node, tuple(places[rank] for rank in range(len(processes)))


def _check_devices(nodes: list[list[Process]], per_node: int) -> None:
    by_platform = {process.platform: process for node in nodes for process in node}
    if len(by_platform) > 1:
        raise JdasoError(
            "nodes have different devices: "
            + _listed(f"{p.host} (rank {p.rank}) has {name}" for name, p in by_platform.items())
            + ". Where a GPU or its driver fails, JAX takes the CPU: look at that host, or say "
            "JAX_PLATFORMS=cpu for all."
        )
    counts = [[process.num_devices for process in node] for node in nodes]
    if len({count for node in counts for count in node}) > 1:
        raise JdasoError(
            "nodes have unequal numbers of devices: "
            + _listed(
                f"node {i} ({node[0].host}) {'+'.join(map(str, count))}"
                for i, (node, count) in enumerate(zip(nodes, counts, strict=True))
            )
            + ". Make the same number visible on every node (CUDA_VISIBLE_DEVICES)."
        )
    visible = counts[0][0]
    if per_node > 1 and visible not in (1, per_node):
        problem = "more ranks than devices" if visible < per_node else "more devices than ranks"
        raise JdasoError(
            f"{problem}: {per_node} processes of node 0 ({nodes[0][0].host}) see {visible} "
            f"devices each. Start one process per node, or {visible} for one per device; if each "
            "process has devices of its own, say processes_per_node=1."
        )


def _listed(parts) -> str:
    return ", ".join(parts)
