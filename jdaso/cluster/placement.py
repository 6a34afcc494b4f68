"""Assigns processes to nodes. A pure function of what all processes report about themselves."""

from typing import NamedTuple

from jdaso.core.types import JdasoError


class Process(NamedTuple):
    """What a process reports to all others about itself."""

    rank: int
    host: str
    memory_group: int  # smallest rank among the processes that share memory with this one
    platform: str
    num_devices: int
    program_size: int = 1  # processes of its JAX program
    program_index: int = 0  # its index among them


class Placement(NamedTuple):
    """The node of a process, and the index of the process within its node."""

    node: int
    local_rank: int


def assign_nodes(
    processes: tuple[Process, ...], processes_per_node: int | None
) -> tuple[int, tuple[Placement, ...]]:
    """The number of processes per node, and the placement of each process.

    ``processes_per_node`` and errors are those of :func:`jdaso.discover_topology`. Messages name
    the hosts.
    """
    hosts: dict[int, list[Process]] = {}
    for process in processes:
        hosts.setdefault(process.memory_group, []).append(process)
    groups = list(hosts.values())
    per_node = processes_per_node
    if per_node is None:
        on_cpu = all(process.platform == "cpu" for process in processes)
        joined = max(process.program_size for process in processes)
        per_node = joined if on_cpu else max(map(len, groups))
    if per_node < 1:
        raise ValueError(f"processes_per_node must be at least 1, got {processes_per_node}.")
    if any(len(group) % per_node for group in groups):
        raise JdasoError(
            f"nodes of {per_node} processes require a multiple of {per_node} processes on every "
            "host, got "
            + ", ".join(f"{len(group)} on {group[0].host}" for group in groups)
            + ". Start the same number on every host, or pass processes_per_node=1 to make each "
            "process a node."
        )
    nodes = [
        group[first : first + per_node]
        for group in groups
        for first in range(0, len(group), per_node)
    ]
    _check_devices(nodes, per_node)
    _check_programs(nodes, per_node)
    placements = {
        process.rank: Placement(node, local_rank)
        for node, members in enumerate(nodes)
        for local_rank, process in enumerate(members)
    }
    return per_node, tuple(placements[rank] for rank in range(len(processes)))


def _check_devices(nodes: list[list[Process]], per_node: int) -> None:
    """Raises JdasoError unless all processes have the same kind and number of devices."""
    by_platform = {process.platform: process for node in nodes for process in node}
    if len(by_platform) > 1:
        raise JdasoError(
            "all nodes must have the same kind of device, got "
            + ", ".join(f"{name} on {p.host} (rank {p.rank})" for name, p in by_platform.items())
            + ". JAX falls back to the CPU where a GPU or its driver fails: check that host, or "
            "set JAX_PLATFORMS=cpu for all processes."
        )
    counts = [[process.num_devices for process in node] for node in nodes]
    if len({count for node in counts for count in node}) > 1:
        raise JdasoError(
            "nodes have unequal numbers of devices, where all must have the same: "
            + ", ".join(
                f"node {i} ({node[0].host}) has {'+'.join(map(str, count))}"
                for i, (node, count) in enumerate(zip(nodes, counts, strict=True))
            )
            + ". Make the same number visible on every node (CUDA_VISIBLE_DEVICES)."
        )
    visible = counts[0][0]
    joined = nodes[0][0].program_size > 1
    if per_node > 1 and visible not in (1, 1 if joined else per_node):
        problem = "more ranks than devices" if visible < per_node else "more devices than ranks"
        raise JdasoError(
            f"{problem}: {per_node} processes of node 0 ({nodes[0][0].host}) see {visible} devices "
            "each, but several processes of a node must have one device each. Start one process "
            f"per node, or {visible} processes per node. If each process has devices to itself, "
            "pass processes_per_node=1."
        )


def _check_programs(nodes: list[list[Process]], per_node: int) -> None:
    """Raises JdasoError unless a JAX program is one process, or the processes of one node."""
    if all(process.program_size == 1 for node in nodes for process in node):
        return
    for node in nodes:
        for local_rank, process in enumerate(node):
            if (process.program_size, process.program_index) != (per_node, local_rank):
                raise JdasoError(
                    f"rank {process.rank} ({process.host}) is process {process.program_index} of "
                    f"{process.program_size} of a JAX program, but process {local_rank} of "
                    f"{per_node} of its node. A JAX program must consist of the processes of one "
                    "node: leave out jax.distributed.initialize, and call "
                    "discover_topology(join_processes=True)."
                )
