"""Measures the CPU time of an exchange, and the start of a job, by the number of processes.

    mpiexec -n 8 python bench/scale.py [--kilobytes 4 1000] [--rounds 100]
    python bench/scale.py --stand-in 1024 8192
    python bench/scale.py start --processes 2 8 24 [--rounds 3]

DASO with period 1 and delay 1 trains a tiny model. The result is the difference of the CPU seconds
of a process between steps with and without exchange, the median over processes, beside MPI's
blocking Allreduce. Sharing a core does not distort CPU seconds.

With --stand-in, one process exchanges over a communicator that claims to have so many members, and
whose collectives complete at once. What is left is the time of jdaso's own code.

With "start", each round runs two jobs one after the other. In the first one, the processes import
JAX, optax and mpi4py, find their devices, and meet at a barrier. In the second one, they import
jdaso as well, call discover_topology and mpi_exchange, and take a training step of DASO that
exchanges 1000 numbers. The table has the seconds of the imports, from the start of the launcher
until the last process is ready; those from discover_topology to the first exchange; their ratio;
and the seconds of each part. All are medians over rounds. A step without exchanges would compile as
well.
"""

import argparse
import itertools
import operator
import os
import statistics
import time
from collections import deque

os.environ.setdefault("NPROC", "4")

import jax
import jax.numpy as jnp
import mpi_job
import numpy as np
import optax
from jax.sharding import PartitionSpec
from machine import header, machine, resident_bytes, row

import jdaso
from jdaso.cluster.topology import Placement, Process
from jdaso.core.exchange import HEADER_SIZE
from jdaso.exchange.host.layout import make_layout
from jdaso.exchange.transport.mpi_transport import Membership, MpiTransport, mpi_table
from jdaso.exchange.transport.progress import Progress

PAUSE = 0.02  # seconds between steps, in which an exchange completes
PARTS = ("discover_topology", "mpi_exchange", "init", "first step")
# Imports nothing of jdaso. Prints the seconds since the time that is its argument.
IMPORTS = """
import sys, time
import jax, optax
from mpi4py import MPI

jax.local_devices()
MPI.COMM_WORLD.Barrier()
seconds = MPI.COMM_WORLD.allreduce(time.time() - float(sys.argv[1]), op=MPI.MAX)
if MPI.COMM_WORLD.rank == 0:
    print("ends", seconds)
"""


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
    shape, float32 = (int(kilobytes * 250),), np.dtype("float32")
    layout = make_layout((shape,), (float32,), (PartitionSpec(),), topology.mesh)
    index, header = table.register(layout), np.ones(HEADER_SIZE, np.float32)
    start = 0.0
    for number in range(rounds + 5):
        if number == 5:
            start = time.process_time()
        slot = table.begin_post(number, number, header, index)
        table.memory(slot).fill([np.ones(shape)])
        table.end_post(slot)
        table.end_collect(table.begin_collect(number, 1), 1, True)
    seconds = (time.process_time() - start) / rounds
    progress.close()
    grown = (resident_bytes() - before) / 2**20
    return row(size, f"{kilobytes:g}", f"{1e3 * seconds:.2f}", f"{grown:.0f}")


def first_exchange() -> None:
    """Takes a step with an exchange. Prints the times at which the last process had each part."""
    ends = [time.time()]
    topology = jdaso.discover_topology(processes_per_node=1)
    ends.append(time.time())
    exchange = jdaso.mpi_exchange(topology)
    ends.append(time.time())
    tx = jdaso.chain(optax.sgd(0.1), jdaso.daso(exchange, 1, 0))

    @jax.jit
    def step(params, state):
        return jdaso.apply_gradients(tx, params, state, params)

    params = jnp.ones(1000)
    state = jax.block_until_ready(tx.init(params))
    ends.append(time.time())
    jax.block_until_ready(step(params, state))
    ends.append(time.time())
    last = map(max, zip(*topology.comm.allgather(ends), strict=True))
    if topology.rank == 0:
        print("ends", *map(repr, last), flush=True)


def start(processes: int, rounds: int) -> str:
    """A row of the table of the start of a job."""

    def ends(*command: object) -> list[float]:
        job = mpi_job.run(processes, 300, *command)
        if job.problem is not None:
            raise SystemExit(f"{job.problem}\n{job.stderr}")
        (line,) = (line for line in job.stdout.splitlines() if line.startswith("ends"))
        return [float(end) for end in line.split()[1:]]

    imports, parts, ratios = [], [], []
    for _ in range(rounds):
        imports += ends("-c", IMPORTS, time.time())
        times = ends(__file__, "--first")
        parts.append([after - before for before, after in itertools.pairwise(times)])
        ratios.append((times[-1] - times[0]) / imports[-1])
    medians = [statistics.median(each) for each in zip(*parts, strict=True)]
    cells = [statistics.median(imports), sum(medians), statistics.median(ratios), *medians]
    return row(processes, *(f"{cell:.2f}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="?", choices=("start",))
    parser.add_argument("--kilobytes", type=float, nargs="+", default=[4, 1000])
    parser.add_argument("--rounds", type=int, help="100 exchanges, or 3 jobs")
    parser.add_argument("--stand-in", type=int, nargs="+", metavar="P", help="numbers of members")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 8], help="with start")
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first:
        return first_exchange()
    if options.part == "start":
        print(machine())
        names = ("processes", "imports, s", "to the first exchange, s", "ratio", *PARTS)
        print(header(*names), flush=True)
        for processes in options.processes:
            print(start(processes, options.rounds or 3), flush=True)
        return
    rounds = options.rounds or 100
    if options.stand_in:
        print(machine())
        print(header("members", "KB", "CPU of an exchange, ms", "memory, MB"))
        for size, kilobytes in itertools.product(options.stand_in, options.kilobytes):
            print(stand_in(size, kilobytes, rounds), flush=True)
        return
    topology = jdaso.discover_topology(processes_per_node=1)
    say = print if topology.rank == 0 else lambda *_, **__: None
    say(machine())
    say(header("processes", "KB", "exchange, ms", "Allreduce, ms"))
    for kilobytes in options.kilobytes:
        times = topology.comm.allgather(measure(topology, kilobytes, rounds))
        exchange, allreduce = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        cells = topology.num_nodes, f"{kilobytes:g}", f"{exchange:.2f}", f"{allreduce:.3f}"
        say(row(*cells), flush=True)


if __name__ == "__main__":
    main()
