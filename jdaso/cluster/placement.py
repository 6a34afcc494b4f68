"""Assigns processes to nodes. A pure function of what all processes report about themselves."""

from collections.abc import Sequence
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
    # A program of several hosts is an error, which the last check explains.
    on_a_host = np.bincount(about["memory_group"]).max()
    per_node = processes_per_node or int(min(about["program_size"].max(), on_a_host))
    placements = fill_nodes(about["memory_group"], about["host"].tolist(), per_node)
    by_node = np.lexsort(np.array(placements).T[::-1])
    about = {name: values[by_node].reshape(-1, per_node) for name, values in about.items()}
    _check_devices(about)
    _check_programs(about, processes_per_node)
    return per_node, placements


def fill_nodes(
    memory_groups: np.ndarray, hosts: Sequence[str], per_node: int
) -> tuple[Placement, ...]:
    """Places the processes of each host in nodes of ``per_node``, in the order of ranks.

    Raises JdasoError unless the number of processes on every host is a multiple of ``per_node``.
    """
    _, first, on_host = np.unique(memory_groups, return_index=True, return_inverse=True)
    counts = np.bincount(on_host)
    if (counts % per_node).any():
        kinds = [f"{counts[i]} on {hosts[first[i]]}" for i in _examples(counts)]
        raise JdasoError(
            f"nodes of {per_node} processes require a multiple of {per_node} processes on every "
            f"host, got {', '.join(kinds)}. Start the same number on every host, or pass "
            "processes_per_node=1 to make each process a node."
        )
    places = np.argsort(np.argsort(on_host, kind="stable"))
    nodes, local_ranks = (places // per_node).tolist(), (places % per_node).tolist()
    return tuple(map(Placement, nodes, local_ranks))


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


def _check_programs(about: dict[str, np.ndarray], processes_per_node: int | None) -> None:
    """Raises JdasoError unless each node is one JAX program, of one process or several."""
    sizes, indices = about["program_size"], about["program_index"]
    per_node, hosts = sizes.shape[1], about["host"]
    wrong = (sizes != per_node) | (indices != np.arange(per_node))
    if (sizes > 1).any() and wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        raise JdasoError(
            f"rank {about['rank'][place]} ({hosts[place]}) is process {indices[place]} of "
            f"{sizes[place]} of a JAX program, but process {place[1]} of {per_node} of its node. "
            "A JAX program must consist of the processes of one node: leave out "
            "jax.distributed.initialize, and call discover_topology(join_processes=True)."
        )
    _, groups, together = np.unique(about["memory_group"], return_index=True, return_counts=True)
    unclear = processes_per_node is None and about["platform"][0, 0] != "cpu"
    if (sizes == 1).all() and (per_node > 1 or (unclear and together.max() > 1)):
        shared = int(np.argmax(together))
        raise JdasoError(
            f"the {together[shared]} processes on {hosts.flat[groups[shared]]} are JAX programs of "
            "their own, but a node is one program. If several processes are meant to be one node, "
            "start one process per node, which uses all of its devices, or join them with "
            "discover_topology(join_processes=True), before anything uses JAX's devices. If each "
            "process is meant to be a node, with devices of its own, pass processes_per_node=1."
        )
    if per_node > 1 and (visible := about["num_devices"][0, 0]) > 1:
        raise JdasoError(
            f"the {per_node} processes of node 0 ({hosts[0, 0]}) have {visible} devices each, but "
            "joined processes must have one device each: start one process for each device, or one "
            "for each node."
        )
