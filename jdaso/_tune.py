"""``python -m jdaso tune``: measures exchanges between the nodes, and says what to choose."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdaso import perf
from jdaso._base import HEADER_SIZE, Exchange
from jdaso._predict import add_model
from jdaso.exchange._mpi import mpi_exchange
from jdaso.topology import Topology, discover_topology

HELP = "measure the network between nodes; say which period and delay to choose"
WIRES = ("float32", "bfloat16", "float16", "int8")
# The longest delays in the papers' studies of accuracy.
TRIED = {"DASO, Table 2": 4, "DaSGD, Fig. 6(e)": 7}
# Below this share of a step, waiting for an exchange is not worth hiding.
WORTHWHILE = 0.01
# Above this share of a step, copies to and from the host are worth a word.
COSTLY = 0.05
# (slowest - fastest) / median of the same exchange; above, something else is going on.
DISTURBED = 0.5


class Measured(NamedTuple):
    """What a sweep has found.

    Attributes:
        exchanges: (bytes, seconds in the background) of each.
        overhead: seconds of one of the largest that are spent on copies before and after it.
    """

    exchanges: list[tuple[float, float]]
    overhead: float

    @property
    def largest(self) -> float:
        """Bytes of the largest exchanges."""
        return max(size for size, _ in self.exchanges)

    def times(self) -> list[float]:
        """Seconds of the largest exchanges."""
        return [seconds for size, seconds in self.exchanges if size == self.largest]


def add_command(commands: Any) -> None:
    """Adds the subcommand to a parser."""
    parser = commands.add_parser("tune", help=HELP)
    add_model(parser, required=True)
    add = parser.add_argument
    add("--step-time", type=float, help="seconds of a training step on one node")
    add("--wire", choices=WIRES, default="float32")
    add("--repeats", type=int, default=5, help="exchanges of each size")
    add("--seconds", type=float, default=60.0, help="larger exchanges are then not measured")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, and prints on rank 0; ends with an error if there is only one node."""
    right = args.parameters >= 1 and args.repeats >= 1
    if not (right and (args.step_time is None or args.step_time > 0)):
        raise SystemExit(
            "jdaso tune: --parameters and --repeats must be at least 1, and --step-time above 0; "
            f"got {args.parameters}, {args.repeats} and {args.step_time}."
        )
    topology = discover_topology()
    if topology.num_nodes == 1:
        raise SystemExit(
            f"jdaso tune: nothing to measure, there is only one node ({topology.host}). Start "
            "one process on each of several: srun --ntasks-per-node=1 python -m jdaso tune ..., "
            "or mpiexec -n 2 python -m jdaso tune ..."
        )
    measured = sweep(topology, args.parameters, args.wire, args.repeats, args.seconds)
    if topology.rank == 0:
        print("\n".join(lines(args, topology, measured)))


def sweep(
    topology: Topology, num_parameters: int, wire: str, repeats: int, seconds: float
) -> Measured:
    """Exchanges of a 256th, a 64th, ... and all of the parameters, until the time is over.

    Collective. The time of an exchange is that of the node for which it took longest, so that
    all nodes have the same numbers, and decide alike when to stop.
    """
    comm = topology.comm.Dup()
    exchange = mpi_exchange(topology)

    def longest(seconds: float) -> float:
        return max(comm.allgather(seconds))

    found: list[tuple[float, float]] = []
    overheads: list[float] = []
    begin = time.monotonic()
    for elements in sorted({max(1, num_parameters // 4**k) for k in range(5)}):
        once = prepare(exchange, elements, wire)
        comm.Barrier()
        # The first one compiles, and touches its memory for the first time.
        flight = longest(once(0.0)[0])
        since, overheads = time.monotonic(), []
        for _ in range(repeats):
            comm.Barrier()
            # Awaited, an exchange is looked at more often than while training goes on.
            flown, overhead = map(longest, once(1.2 * flight))
            found.append((perf.wire_bytes(elements, wire), flown))
            overheads.append(overhead)
            flight = min(flight, flown)
        # The next size takes about four times as long. Two sizes are needed.
        now = time.monotonic()
        until_next = longest(now - begin + 4 * (now - since))
        if until_next > seconds and len(found) > repeats:
            break
    comm.Free()
    return Measured(found, statistics.median(overheads))


def prepare(exchange: Exchange, elements: int, wire: str) -> Callable[[float], tuple[float, float]]:
    """An exchange of so many float32 numbers, left alone for the given seconds.

    Returns:
        A function that returns the seconds it flew, and those spent on copies around it.
    """
    leaf = jnp.zeros(elements, jnp.float32)
    header = jnp.zeros(HEADER_SIZE, jnp.float32).at[0].set(1.0)
    post = jax.jit(lambda state, n, leaf: exchange.start(state, n, n, [leaf], header, wire))
    collect = jax.jit(lambda state, n, leaf: exchange.finish(state, n, [leaf]))
    state, number = exchange.init([leaf]), jnp.int32(0)

    def once(left_alone: float) -> tuple[float, float]:
        nonlocal state, number
        before, start = exchange.report(), time.monotonic()
        state, following = jax.block_until_ready(post(state, number, leaf))
        posted = time.monotonic()
        time.sleep(left_alone)
        awake = time.monotonic()
        _, _, state = jax.block_until_ready(collect(state, number, leaf))
        end, after, number = time.monotonic(), exchange.report(), following
        waited = after["seconds_blocked"] - before["seconds_blocked"]
        flown = after["seconds_in_flight"] - before["seconds_in_flight"]
        return flown, posted - start + end - awake - waited

    return once


def lines(args: argparse.Namespace, topology: Topology, measured: Measured) -> list[str]:
    """What rank 0 prints."""
    nodes, size = topology.num_nodes, perf.wire_bytes(args.parameters, args.wire)
    times, share = measured.times(), size / measured.largest
    median, overhead = statistics.median(times), measured.overhead * share
    said = [
        f"{nodes} nodes; {args.parameters} parameters, {size / 1e6:.4g} MB in {args.wire}; "
        f"{len(measured.exchanges)} exchanges in the background"
    ]
    exchange_time, next_command = median * share, ""
    try:
        network = perf.fit(measured.exchanges, nodes)
    except ValueError as error:
        said.append(f"bandwidth  unknown: {error}")
    else:
        if share > 1:
            exchange_time = perf.allreduce_time(size, nodes, network=network)
        said.append(f"latency    {network.latency:.3g} s")
        said.append(f"bandwidth  {8e-9 * network.bandwidth:.3g} Gbit/s")
        next_command = (
            f"\nHow it scales: python -m jdaso predict --parameters {args.parameters} "
            f"{f'--wire {args.wire} ' * (args.wire != 'float32')}--step-time "
            f"{args.step_time or 'SECONDS'} --bandwidth {8e-9 * network.bandwidth:.3g} "
            f"--latency {network.latency:.3g} --overhead {overhead:.3g}"
        )
    known = "" if share == 1 else f" (measured up to {measured.largest / 1e6:.4g} MB)"
    said.append(f"exchange   {exchange_time:.4g} s{known}")
    said.append(f"copies     {overhead:.3g} s per exchange, which no delay hides\n")
    if args.step_time is None:
        delays = [f"{d} for steps above {exchange_time / d:.3g} s" for d in (1, 2, 4)]
        said.append(f"Give --step-time to be told what to choose; delay {', '.join(delays)}.")
    else:
        said += advice(args.step_time, exchange_time, overhead, args.wire)
    if max(times) - min(times) > DISTURBED * median:
        said.append(
            f"Not to be trusted: the same exchange took {min(times):.3g} to {max(times):.3g} s. "
            "Hosts or network are busy with something else; measure again without it."
        )
    hosts = len({process.host for process in topology.processes})
    if hosts < nodes:
        said.append(
            f"Not a network: {nodes} nodes share {hosts} host{'s' * (hosts > 1)}, so messages "
            "went through memory."
        )
    return [*said, next_command]


def advice(step_time: float, exchange_time: float, overhead: float, wire: str) -> list[str]:
    """Period and delay, why, what to expect of them, and when they will not help.

    >>> advice(step_time=0.1, exchange_time=0.15, overhead=0.0, wire="int8")[0][:52]
    'Choose period 3, delay 2, as in jdaso.dasgd(exchange'
    """
    period, delay = perf.recommend(step_time, exchange_time)

    def expected(period: int, delay: int) -> str:
        step = perf.mean_step_time(step_time, exchange_time, period, delay) + overhead / period
        return f"{step:.4g} s ({step / step_time - 1:+.1%})"

    said = [
        f"Choose period {period}, delay {delay}, as in jdaso.dasgd(exchange, period={period}, "
        f"delay={delay}, wire='{wire}'): an exchange takes {exchange_time / step_time:.3g} steps, "
        f"so it has arrived after {delay} (DaSGD Eq. 3); periods longer than delay + 1 cost "
        "accuracy (Sec. VI-D).",
        f"A step of {step_time:.4g} s then takes {expected(period, delay)}; waiting for exchanges, "
        f"{expected(1, 0)} with one at every step, {expected(period, 0)} with period {period}.",
    ]
    if exchange_time < WORTHWHILE * step_time:
        said.append(
            f"It will not help: an exchange takes {exchange_time / step_time:.2%} of a step. Wait "
            "for one at every step (period 1, delay 0): then nothing is stale."
        )
    beyond = [f"{paper}: up to {longest}" for paper, longest in TRIED.items() if delay > longest]
    if beyond:
        said.append(
            f"It may cost accuracy: delay {delay} is longer than what was tried "
            f"({'; '.join(beyond)}). Take a narrower wire or a larger batch per node, or diloco, "
            "which is made for long periods."
        )
    if overhead > COSTLY * step_time * period:
        said.append(
            f"Copies to and from the host cost {overhead / (step_time * period):.1%} of the time, "
            "which no delay hides. A longer period makes them fewer."
        )
    return said
