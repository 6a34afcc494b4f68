"""What one looks at before a training and after it, on the command line.

``python -m jdaso topology`` prints what the library sees of the cluster, ``compare`` trains a small
network with every algorithm on a virtual one, ``report`` draws trainings. ``tune`` measures the
network between nodes and says which period and delay to choose, ``predict`` how that scales.
``sbatch`` writes a job script for Slurm, ``verify`` looks at a checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jdaso import _predict, _sbatch, _tune, _verify
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


def copies(topology: Topology) -> str:
    """What copies parameters to the host and back in an ``mpi_exchange`` of this process."""
    from jdaso.exchange._native import why_not

    reason = why_not(topology.devices[0].platform)
    return "compiled code" if reason is None else f"host callbacks: {reason}"


def print_report(folders: list[Path], out: Path | None) -> None:
    """Prints a table of runs, draws them, and prints where."""
    from jdaso import report

    try:
        runs = report.read_all(folders)
        print(f"{report.summary(runs)}\n")
        print(report.draw(runs, out))
    except (ImportError, OSError, ValueError) as error:
        raise SystemExit(f"jdaso report: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jdaso", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    topology = commands.add_parser("topology", help="print nodes, devices and communicators")
    topology.add_argument("--processes-per-node", type=int, default=None)
    topology.add_argument("--devices", type=int, default=0, help="virtual CPU devices to make")
    compare = commands.add_parser("compare", help="train with every algorithm on a virtual cluster")
    add = compare.add_argument
    add("--data", default="digits", help="digits, or a folder with train/ and val/ or test/")
    add("--nodes", type=int, default=8)
    add("--epochs", type=int, default=24)
    add("--batch-size", type=int, default=16, help="images per node and step")
    add("--learning-rate", type=float, default=0.05, help="the highest one")
    add("--momentum", type=float, default=0.9)
    add("--period", type=int, default=4, help="steps between two exchanges")
    add("--delay", type=int, default=1, help="steps that an exchange flies")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("runs/compare"), help="folder for plot.png")
    report = commands.add_parser("report", help="draw trainings, and compare them in a table")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="has a metrics.jsonl")
    report.add_argument(
        "--out", type=Path, help="picture to write (report.png: of one run in it, of several here)"
    )
    _predict.add_command(commands)
    _tune.add_command(commands)
    _sbatch.add_command(commands)
    _verify.add_command(commands)
    arguments, unknown = parser.parse_known_args()
    if unknown:
        hint = "; put -- before the program" if arguments.command == "sbatch" else ""
        commands.choices[arguments.command].error(
            f"unrecognized arguments: {' '.join(unknown)}{hint}"
        )
    if arguments.command in ("predict", "sbatch", "tune", "verify"):
        arguments.run(arguments)
        return
    if arguments.command == "report":
        print_report(arguments.runs, arguments.out)
        return
    if arguments.command == "compare":
        from jdaso import _compare

        _compare.compare(arguments)
        return
    if arguments.devices:
        use_virtual_devices(arguments.devices)
    found = discover_topology(arguments.processes_per_node)
    text = table(found)
    if found.rank == 0:
        print(f"{text}\n\ncopies by {copies(found)}")


if __name__ == "__main__":
    main()
