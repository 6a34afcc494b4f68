"""Processes, devices, launchers, heartbeats, and the coordinated shutdown of a job.

An entry is a top-level folder or module of jdaso. This one imports only the entry
:mod:`jdaso.core`. The entries checkpoint, exchange, passm, center and perf may import it.

When a process dies, its ``heartbeat`` connection closes, and ``abort`` ends all other processes.
With a centre, ``center/server/liveness`` marks a dead worker as gone, and the others continue. Only
the death of node 0, which runs the server, ends the job. ``sbatch`` writes the job script that
starts a job again after a death.
"""

from jdaso.cluster.heartbeat import EXIT_NODE_LOST
from jdaso.cluster.local_devices import pmean, use_virtual_devices
from jdaso.cluster.preemption import EXIT_TRY_AGAIN, Preemption

__all__ = ["EXIT_NODE_LOST", "EXIT_TRY_AGAIN", "Preemption", "pmean", "use_virtual_devices"]
