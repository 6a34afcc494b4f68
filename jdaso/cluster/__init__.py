"""Processes, devices, launchers, heartbeats, and the coordinated end of a job.

An entry is a top-level folder or module of jdaso. This one imports only the entry
:mod:`jdaso.core`. The entries checkpoint, exchange, passm, center and perf may import it.

- ``topology``: which processes and devices the job has, and what its processes do together.
- ``launchers``: the table of launchers. ``sbatch`` writes a job script for one of them.
- ``heartbeat``: notices deaths and silence, over the TCP connections of ``links``, and carries the
  questions of ``roll_call``: who has not posted an operation?
- ``ending``: what a death does, and how a job ends.
- ``local_devices``: means over the devices of a node. ``mpi_types``: what jdaso uses of MPI.
"""

from jdaso.cluster.ending import EXIT_NODE_LOST, EXIT_TRY_AGAIN, Preemption
from jdaso.cluster.local_devices import pmean, use_virtual_devices
from jdaso.cluster.topology import Group

__all__ = [
    "EXIT_NODE_LOST",
    "EXIT_TRY_AGAIN",
    "Group",
    "Preemption",
    "pmean",
    "use_virtual_devices",
]
