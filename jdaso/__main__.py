"""``python -m jdaso topology``: what the library sees of the cluster."""

from __future__ import annotations

import argparse

from jdaso.local import use_virtual_devices
from jdaso.topology import Topology, discover_topology, library, thread_level

HEAD = (
    "rank",
    "host",
    "node",
    "local index",
    "devices",
    "communicators (index:size)",
    "threads",
    "MPI library",
)


def table(topology: Topology) -> str:
    """The topology as text, a line per process; collective over all processes.

    >>> from jdaso.topology import discover_topology
    >>> table(discover_topology()).split()[:3]
    ['rank', 'host', 'node']
    """
    if topology.comm is None:
        name, level = "none", "-"
    else:
        from mpi4py import MPI

        name, level = library(MPI), thread_level(MPI)
    groups = topology.group_communicators()
    joined = " ".join(
        f"{index}:{'-' if group is None else group.Get_size()}"
        for index, group in enumerate(groups)
    )
    for group in groups:
        if group is not None:
            group.Free()
    last = topology.local_rank + len(topology.devices) - 1
    row = (
        str(topology.rank),
        topology.host,
        str(topology.node),
        str(topology.local_rank) if topology.processes_per_node > 1 else f"0..{last}",
        ",".join(f"{d.platform}:{d.id}" for d in topology.devices),
        joined,
        level,
        name,
    )
    rows = [row] if topology.comm is None else topology.comm.allgather(row)
    widths = [max(len(line[i]) for line in [HEAD, *rows]) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [HEAD, *rows]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jdaso", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    topology = commands.add_parser("topology", help="print nodes, devices and communicators")
    topology.add_argument("--processes-per-node", type=int, default=None)
    topology.add_argument("--devices", type=int, default=0, help="virtual CPU devices to make")
    arguments = parser.parse_args()
    if arguments.devices:
        use_virtual_devices(arguments.devices)
    found = discover_topology(arguments.processes_per_node)
    text = table(found)
    if found.rank == 0:
        print(text)


if __name__ == "__main__":
    main()
