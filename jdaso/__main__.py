"""Commands to inspect a cluster, to plan a training on it, and to check its checkpoints.

``python -m jdaso topology`` prints the nodes, devices and communicators. ``tune`` measures the
network between nodes and recommends wire, period and delay. ``predict`` predicts the scaling.
``sbatch`` writes a job script for Slurm. ``verify`` checks a checkpoint.
"""

from __future__ import annotations

import argparse

from jdaso.checkpoint import verify
from jdaso.cluster import sbatch
from jdaso.cluster.local_devices import use_virtual_devices
from jdaso.cluster.topology import Topology, discover_topology, library, thread_level
from jdaso.core.command_line import text_table
from jdaso.exchange.host.slots import why_callbacks
from jdaso.perf import predict_command, tune_command


def topology_table(topology: Topology) -> str:
    """Returns the topology as text with one line per process. This is collective.

    >>> from jdaso.cluster.topology import discover_topology
    >>> topology_table(discover_topology()).split()[:3]
    ['rank', 'host', 'node']
    """
    if topology.comm is None:
        name, level = "none", "-"
    else:
        from mpi4py import MPI

        name, level = library(MPI), thread_level(MPI)
    first, last = topology.local_rank, topology.local_rank + len(topology.devices) - 1
    size = "-" if topology.comm is None else topology.num_nodes
    row = (
        str(topology.rank),
        topology.host,
        str(topology.node),
        str(first) if topology.joined else f"0..{last}",
        ",".join(f"{d.platform}:{d.id}" for d in topology.devices),
        " ".join(f"{index}:{size}" for index in range(first, last + 1)),
        level,
        name,
    )
    rows = topology.group.gather(row)
    head = ("rank", "host", "node", "local index", "devices", "communicators (index:size)")
    return text_table([(*head, "threads", "MPI library"), *rows], numbers=False)


def print_topology(arguments: argparse.Namespace) -> None:
    """Runs the command ``topology``."""
    if arguments.devices:
        use_virtual_devices(arguments.devices)
    topology = discover_topology(arguments.processes_per_node, arguments.join_processes)
    text = topology_table(topology)
    if topology.rank == 0:
        # How an mpi_exchange of this process copies parameters to the host and back.
        reason = why_callbacks(topology.devices)
        copies = "compiled code" if reason is None else f"host callbacks: {reason}"
        print(f"{text}\n\ncopies by {copies}")


def main() -> None:
    """Parses the command line and runs the command."""
    parser = argparse.ArgumentParser(prog="python -m jdaso", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    topology = commands.add_parser("topology", help="print nodes, devices and communicators")
    topology.add_argument("--processes-per-node", type=int, default=None)
    topology.add_argument("--join-processes", action="store_true", help="make them one program")
    topology.add_argument("--devices", type=int, default=0, help="number of virtual CPU devices")
    topology.set_defaults(run=print_topology)
    for module in (predict_command, tune_command, sbatch, verify):
        module.add_command(commands)
    arguments, unknown = parser.parse_known_args()
    if unknown:
        hint = "; put -- before the program" if arguments.command == "sbatch" else ""
        commands.choices[arguments.command].error(
            f"unrecognized arguments: {' '.join(unknown)}{hint}"
        )
    arguments.run(arguments)


if __name__ == "__main__":
    main()
