"""A process dies, stops, is slow, or simply ends; how the others end is for the test to judge."""

import multiprocessing
import os
import signal
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np

import jdaso
from jdaso.cluster import heartbeat

case = sys.argv[1]
# So that the tests are short.
heartbeat.BEAT_SECONDS, heartbeat.SILENT_SECONDS = 0.2, 1.0
joined = case == "killed joined"
topology = jdaso.discover_topology(2 if joined else None, join_processes=joined)
assert topology.joined == joined
rank = topology.rank


def wait_in_vain():
    # Nobody exchanges anything, so MPI does not see that one is missing.
    time.sleep(120)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def broadcast_before_and_after(pause, timeout):
    exchange = jdaso.mpi_exchange(topology, timeout=timeout)
    ones = {"w": jnp.ones(3)}
    jdaso.broadcast(exchange, ones)
    if rank == 1:
        pause()
    # Not a broadcast: it waits for its root only.
    np.testing.assert_array_equal(jdaso.consensus(exchange, ones)["w"], 1.0)


def fork(seconds):
    # Fork, whatever the default of this Python: such a child has its parent's sockets.
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(seconds,))
    child.start()
    return child


if case.endswith("exit"):
    dead, exchange = int(sys.argv[2]), jdaso.mpi_exchange(topology)
    if rank == dead and case == "killed before its exit":  # the others wait for it there
        time.sleep(1)
        die()
    elif rank == dead:
        killer = threading.Timer(1, die)
        killer.daemon = True
        killer.start()
    elif rank == topology.num_nodes - 1 and case == "killed while it waits at exit":
        wait_in_vain()
elif case == "killed when all others have ended":
    if rank == int(sys.argv[2]):
        time.sleep(2)
        die()
elif case.startswith("killed"):
    dead = int(sys.argv[2])
    if rank == dead:
        if case == "killed beside its child":
            fork(20)
        time.sleep(0.5)
        die()
    wait_in_vain()
elif case == "exception":
    if rank == 1:
        raise ZeroDivisionError("what went wrong")
    wait_in_vain()
elif case == "exception in a child":
    if rank == 1 and os.fork() == 0:
        try:
            raise ZeroDivisionError("of no importance")
        except ZeroDivisionError:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
elif case == "stopped":
    broadcast_before_and_after(lambda: os.kill(os.getpid(), signal.SIGSTOP), timeout=6)
elif case == "exited":
    if rank != 1:
        topology.group.barrier("a test", timeout=4)
elif case == "slow":
    broadcast_before_and_after(lambda: time.sleep(8), timeout=12)
elif case == "ended":
    child = fork(0.1)
    time.sleep(0.7 * ((rank + 1) % topology.num_nodes))
    child.join()
else:
    raise SystemExit(f"no such case: {case}")
print(f"rank {rank} came to its end", flush=True)
sys.exit(0)
