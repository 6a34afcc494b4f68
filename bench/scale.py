"""Measures the CPU time of an exchange by the number of processes.

    mpiexec -n 8 python bench/scale.py [--kilobytes 4 1000] [--rounds 100]
    python bench/scale.py --stand-in 1024 8192

DASO with period 1 and delay 1 trains a tiny model. The result is the difference of the CPU seconds
of a process between steps with and without exchange, the median over processes, beside MPI's
blocking Allreduce. Sharing a core does not distort CPU seconds.

With --stand-in, one process exchanges over a communicator that claims to have so many members, and
whose collectives complete at once. What is left is the time of jdaso's own code.
"""

import argparse
import operator
import os
import statistics
import time
from collections import deque

os.environ.setdefault("NPROC", "4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from exchange import resident_bytes
from machine import machine

import jdaso
from jdaso.cluster.topology import Placement, Process
from jdaso.core.exchange import HEADER_SIZE
from jdaso.exchange.host.layout import LeafSpec, unsharded
from jdaso.exchange.transport.mpi_transport import Membership, MpiTransport, mpi_table
from jdaso.exchange.transport.progress import Progress

PAUSE = 0.02  # seconds between steps, in which an exchange completes


def measure(topology: jdaso.Topology, kilobytes: float, rounds: int) -> tuple[float, float]:
    """CPU seconds of this process for an exchange, and for a blocking Allreduce."""
    comm = topology.comm
    params = [jnp.ones(int(kilobytes * 250), jnp.float32)]

    def prepare(tx):
        state = [params, tx.init(params)]

        @jax.jit
        def step(params, state):
            updates, state = tx.update([0.01 * params[0]], state, params)
            return optax.apply_updates(params, updates), state

        def run(rounds):
            comm.Barrier()
            start = time.process_time()
            for _ in range(rounds):
                state[:] = jax.block_until_ready(step(*state))
                time.sleep(PAUSE)
            return (time.process_time() - start) / rounds

        run(5)
        return run

    with jdaso.mpi_exchange(topology) as exchange:
        alone = prepare(optax.sgd(0.1))
        within = prepare(optax.chain(optax.sgd(0.1), jdaso.daso(exchange, 1, 1)))
        extra = statistics.median(within(rounds) - alone(rounds) for _ in range(3))
    own, target = np.ones(params[0].shape, np.float32), np.empty(params[0].shape, np.float32)
    comm.Barrier()
    start = time.process_time()
    for _ in range(rounds):
        comm.Allreduce(own, target)
    return extra, (time.process_time() - start) / rounds


class Complete:
    """A request that has completed."""

    def Test(self):
        return True

    def Testany(self, requests):
        return 0, True


class StandIn:
    """A communicator of many members. All of them send what this one sends."""

    def __init__(self, size):
        self.size = size

    def Get_rank(self):
        return 0

    def Get_size(self):
        return self.size

    def Dup(self):
        return self

    def Split(self, color, key):
        return self

    def Irecv(self, buffer, source, tag):
        return Complete()

    def Iallgather(self, own, all_members):
        all_members.reshape(self.size, -1)[:] = own
        return Complete()

    def Ialltoallv(self, send, receive):
        for _, vectors, _ in filter(None, (send, receive)):
            for numbers in vectors:  # mpi4py converts counts and starts one by one
                deque(map(operator.index, numbers), maxlen=0)
        return Complete()

    Iallgatherv = Ialltoallv


def stand_in(size: int, kilobytes: float, rounds: int) -> str:
    """A row of the table of exchanges over a stand-in."""
    before = resident_bytes()
    process = Process(0, "host", 0, "cpu", 1)
    topology = jdaso.Topology(
        rank=0,
        processes=tuple(process._replace(rank=rank) for rank in range(size)),
        placements=tuple(Placement(rank, 0) for rank in range(size)),
        processes_per_node=1,
        devices=tuple(jax.local_devices()),
        comm=StandIn(size),
    )
    membership = Membership(topology, chunk_bytes=1 << 22)
    table = mpi_table(topology)
    progress = Progress(topology, 60.0, lambda progress: None, topology.abort, table)
    MpiTransport(membership, progress)
    layout = unsharded([LeafSpec((int(kilobytes * 250),), np.dtype("float32"))])
    index, header = table.register(layout), np.ones(HEADER_SIZE, np.float32)
    start = 0.0
    for number in range(rounds + 5):
        if number == 5:
            start = time.process_time()
        slot = table.begin_post(number, number, header, index)
        table.memory(slot).fill([np.ones(layout.specs[0].shape)])
        table.end_post(slot)
        table.end_collect(table.begin_collect(number, 1), 1, True)
    seconds = (time.process_time() - start) / rounds
    progress.close()
    grown = (resident_bytes() - before) / 2**20
    return f"| {size} | {kilobytes:g} | {1e3 * seconds:.2f} | {grown:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[4, 1000])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--stand-in", type=int, nargs="+", metavar="P", help="numbers of members")
    options = parser.parse_args()
    if options.stand_in:
        print(machine())
        print("| members | KB | CPU of an exchange, ms | memory, MB |\n|---|---|---|---|")
        for size in options.stand_in:
            for kilobytes in options.kilobytes:
                print(stand_in(size, kilobytes, options.rounds), flush=True)
        return
    topology = jdaso.discover_topology(processes_per_node=1)
    say = print if topology.rank == 0 else lambda *_, **__: None
    say(machine())
    say("| processes | KB | exchange, ms | Allreduce, ms |\n|---|---|---|---|")
    for kilobytes in options.kilobytes:
        times = topology.comm.allgather(measure(topology, kilobytes, options.rounds))
        exchange, allreduce = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        say(
            f"| {topology.num_nodes} | {kilobytes:g} | {exchange:.2f} | {allreduce:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
