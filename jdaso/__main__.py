"""Commands to inspect a cluster, to plan a training on it, and to check its checkpoints.

``python -m jdaso doctor`` prints which MPI, launcher and devices it found, and makes an exchange.
``tune`` measures the network between nodes and recommends wire, period and delay. ``predict``
predicts the scaling. ``sbatch`` writes a job script for Slurm. ``verify`` checks a checkpoint.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import importlib.metadata
import os
import platform
import socket
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jdaso import __version__
from jdaso.checkpoint import verify
from jdaso.cluster import launchers, sbatch
from jdaso.cluster.local_devices import use_virtual_devices
from jdaso.cluster.topology import Topology, discover_topology, library, thread_level
from jdaso.core.command_line import text_table
from jdaso.core.consensus import consensus
from jdaso.core.types import JdasoError
from jdaso.exchange.host.slots import load, why_callbacks
from jdaso.exchange.mpi import mpi_exchange
from jdaso.perf import predict_command, tune_command

_LIMIT_SECONDS = 30.0


def doctor(arguments: argparse.Namespace) -> None:
    """Runs the command ``doctor``: prints what was found, and makes one exchange.

    Ends a process that hangs, also inside MPI, where no Python code can run. It then prints what to
    do and, a second later, the traceback.
    """
    sys.excepthook = _explain
    advice = (
        f"not ready: {socket.gethostname()} still waits after {_LIMIT_SECONDS:g} s. If the "
        "traceback ends in _start_mpi, MPI cannot start: check that all processes have been "
        "started, and that the launcher belongs to this MPI (docs/guides/launching.md). Otherwise "
        "a process or a device does not respond."
    )
    faulthandler.dump_traceback_later(_LIMIT_SECONDS + 1, exit=True)
    with launchers.said_after(_LIMIT_SECONDS, advice):
        if arguments.devices:
            use_virtual_devices(arguments.devices)
        topology = discover_topology(arguments.processes_per_node, arguments.join_processes)
        if problem := launchers.missing_srun(os.environ):
            raise JdasoError(problem)
        if topology.comm is None:
            raise JdasoError("mpi4py cannot be imported. Install it: pip install mpich mpi4py")
        load()
        report = "\n\n".join((versions(topology), topology_table(topology), exchanged(topology)))
        if topology.rank == 0:
            print(f"{report}\n\nready", flush=True)
    faulthandler.cancel_dump_traceback_later()


def versions(topology: Topology) -> str:
    """Returns versions and launcher, or raises JdasoError if processes differ; collective."""
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "numpy")}
    found = {"jdaso": __version__, "Python": platform.python_version(), **found}
    texts = topology.group.gather(", ".join(f"{name} {text}" for name, text in found.items()))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise JdasoError(
                f"processes have different versions: {topology.describe(0)} has {texts[0]}, and "
                f"{topology.describe(rank)} has {text}. Install the same on every host."
            )
    launcher = launchers.detect_launch(os.environ).launcher
    reason = why_callbacks(topology.devices)
    copies = "compiled code" if reason is None else f"host callbacks: {reason}"
    manager = f" ({launcher.manager})" if launcher.manager else ""
    return f"{texts[0]}\nlauncher: {launcher.name}{manager}\ncopies by {copies}"


def topology_table(topology: Topology) -> str:
    """Returns the topology as text with one line per process; collective.

    >>> from jdaso.cluster.topology import discover_topology
    >>> topology_table(discover_topology()).split()[:3]
    ['rank', 'host', 'node']
    """
    from mpi4py import MPI

    first, last = topology.local_rank, topology.local_rank + len(topology.devices) - 1
    row = (
        str(topology.rank),
        topology.host,
        str(topology.node),
        str(first) if topology.joined else f"0..{last}",
        ",".join(f"{d.platform}:{d.id}" for d in topology.devices),
        " ".join(f"{index}:{topology.num_nodes}" for index in range(first, last + 1)),
        thread_level(MPI),
        library(MPI),
    )
    rows = topology.group.gather(row)
    head = ("rank", "host", "node", "local index", "devices", "communicators (index:size)")
    return text_table([(*head, "threads", "MPI library"), *rows], numbers=False)


def exchanged(topology: Topology) -> str:
    """Makes an exchange and says what came of it; collective.

    Raises JdasoError where the mean has other bits than NumPy's.
    """
    nodes = topology.num_nodes
    if nodes == 1:
        return "one node: nothing to exchange with. Start several processes with mpiexec or srun"
    sent = np.random.default_rng(0).standard_normal((nodes, 4096), np.float32)
    expected = functools.reduce(np.add, sent) / np.float32(nodes)
    with mpi_exchange(topology, timeout=_LIMIT_SECONDS / 2) as exchange:
        own = jax.device_put(sent[topology.node], NamedSharding(topology.mesh, PartitionSpec()))
        mean = np.asarray(consensus(exchange, own))
    distances = mean.view(np.int32).astype(int) - expected.view(np.int32)
    # jdaso multiplies where NumPy divides, which may change the last bit.
    exact = nodes & (nodes - 1) == 0
    if wrong := int(np.sum(np.abs(distances) > (0 if exact else 1))):
        raise JdasoError(
            f"{wrong} of {mean.size} numbers that {topology.describe(topology.rank)} received have "
            "other bits than the mean that NumPy computes. Check MPI and its network with another "
            "program, and another MPI with this command."
        )
    return f"an exchange between {nodes} nodes has the bits that NumPy expects"


def _explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Prints what to do, for an error that says it; a traceback for others."""
    if not isinstance(error, JdasoError):
        sys.__excepthook__(kind, error, trace)
    print(f"not ready: {error}", file=sys.stderr, flush=True)


def main() -> None:
    """Parses the command line and runs the command."""
    parser = argparse.ArgumentParser(prog="python -m jdaso", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser("doctor", help="check MPI, launcher, devices and an exchange")
    checks.add_argument("--processes-per-node", type=int, default=None)
    checks.add_argument("--join-processes", action="store_true", help="make them one program")
    checks.add_argument("--devices", type=int, default=0, help="number of virtual CPU devices")
    checks.set_defaults(run=doctor)
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
