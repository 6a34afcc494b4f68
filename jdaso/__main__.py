"""``python -m jdaso topology``: what the library sees of the cluster."""

from __future__ import annotations

import argparse

from jdaso.local import use_virtual_devices
from jdaso.topology import discover_topology, table


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
