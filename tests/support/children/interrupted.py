"""Only the last node hears a signal, at its own step; all stop at the same one."""

import os
import signal
import sys
import time

import jdaso

topology = jdaso.discover_topology()
exchange = jdaso.mpi_exchange(topology)
last = topology.node == topology.num_nodes - 1
step = 0
with jdaso.cluster.Preemption() as preemption:
    while not preemption.requested(exchange):
        step += 1
        if last and step == 7:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.001 * topology.node)
assert all(stopped == step for stopped in topology.comm.allgather(step))
assert step == 11, step  # asked at the call after step 7, known four calls later
os.kill(os.getpid(), signal.SIGTERM)  # as a launcher may: it no longer matters
print(f"rank {topology.rank} passed", flush=True)
sys.exit(jdaso.cluster.EXIT_TRY_AGAIN)
