"""Assigns processes to nodes. A pure function of what all processes report about themselves."""

from typing import NamedTuple

import numpy as np

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

    Argument and errors are those of :func:`jdaso.discover_topology`. Messages name the hosts.
    """
    about = {
        name: np.array(values) for name, *values in zip(Process._fields, *processes, strict=True)
    }
    _, first, on_host = np.unique(about["memory_group"], return_index=True, return_inverse=True)
    counts = np.bincount(on_host)
    per_node = processes_per_node
    if per_node is None:
        on_cpu = bool((about["platform"] == "cpu").all())
        per_node = int(np.max(about["program_size"] if on_cpu else counts))
    if per_node < 1:
        raise ValueError(f"processes_per_node must be at least 1, got {processes_per_node}.")
    if (counts % per_node).any():
        kinds = [f"{counts[i]} on {processes[first[i]].host}" for i in _examples(counts)]
        raise JdasoError(
            f"nodes of {per_node} processes require a multiple of {per_node} processes on every "
            f"host, got {', '.join(kinds)}. Start the same number on every host, or pass "
            "processes_per_node=1 to make each process a node."
        )
    by_node = np.argsort(on_host, kind="stable")
    places = np.argsort(by_node)
    about = {name: values[by_node].reshape(-1, per_node) for name, values in about.items()}
    _check_devices(about)
    _check_programs(about)
    nodes, local_ranks = (places // per_node).tolist(), (places % per_node).tolist()
    return per_node, tuple(map(Placement, nodes, local_ranks))


def _examples(values: np.ndarray) -> list[int]:
    """The first index of each different row, in the order of indices."""
    return sorted(np.unique(values, axis=0, return_index=True)[1].tolist())


def _check_devices(about: dict[str, np.ndarray]) -> None:
    """Raises JdasoError unless all processes have the same kind and number of devices.

    ``about`` has an array [node, local rank] for each field of :class:`Process`.
    """
    ranks, hosts, platforms = (about[name].flat for name in ("rank", "host", "platform"))
    if len(kinds := _examples(about["platform"].reshape(-1))) > 1:
        raise JdasoError(
            "all nodes must have the same kind of device, got "
            + ", ".join(f"{platforms[i]} on {hosts[i]} (rank {ranks[i]})" for i in kinds)
            + ". JAX falls back to the CPU where a GPU or its driver fails: check that host, or "
            "set JAX_PLATFORMS=cpu for all processes."
        )
    counts, first_hosts = about["num_devices"], about["host"][:, 0]
    if (counts != counts[0, 0]).any():
        raise JdasoError(
            "nodes have unequal numbers of devices, where all must have the same: "
            + ", ".join(
                f"node {i} ({first_hosts[i]}) has {'+'.join(map(str, counts[i]))}"
                for i in _examples(counts)
            )
            + ". Make the same number visible on every node (CUDA_VISIBLE_DEVICES)."
        )
    visible, per_node = counts[0, 0], counts.shape[1]
    joined = about["program_size"][0, 0] > 1
    if per_node > 1 and visible not in (1, 1 if joined else per_node):
        problem = "more ranks than devices" if visible < per_node else "more devices than ranks"
        raise JdasoError(
            f"{problem}: {per_node} processes of node 0 ({first_hosts[0]}) see {visible} devices "
            "each, but several processes of a node must have one device each. Start one process "
            f"per node, or {visible} processes per node. If each process has devices to itself, "
            "pass processes_per_node=1."
        )


def _check_programs(about: dict[str, np.ndarray]) -> None:
    """Raises JdasoError unless a JAX program is one process, or the processes of one node."""
    sizes, indices = about["program_size"], about["program_index"]
    per_node = sizes.shape[1]
    wrong = (sizes != per_node) | (indices != np.arange(per_node))
    if (sizes > 1).any() and wrong.any():
        node, local_rank = np.argwhere(wrong)[0]
        place = node, local_rank
        raise JdasoError(
            f"rank {about['rank'][place]} ({about['host'][place]}) is process {indices[place]} of "
            f"{sizes[place]} of a JAX program, but process {local_rank} of {per_node} of its node. "
            "A JAX program must consist of the processes of one node: leave out "
            "jax.distributed.initialize, and call discover_topology(join_processes=True)."
        )
