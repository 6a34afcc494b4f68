"""``python -m jdaso tune``: measures exchanges, and recommends wire, period and delay."""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdaso import perf
from jdaso.algorithms.dasgd import dasgd
from jdaso.cluster.topology import Group, Topology, discover_topology
from jdaso.core.command_line import text_table, wrapped
from jdaso.core.engine import move
from jdaso.core.exchange import Exchange
from jdaso.core.types import ParamsWithMoments, PyTree
from jdaso.exchange.mpi import mpi_exchange
from jdaso.perf.model import COMPARED_WIRES, FLOAT32_WIRES
from jdaso.perf.predict_command import add_model, advice
from jdaso.schedules import constant

# A measurement was disturbed if equal exchanges, or the quartiles of equal computations, differ by
# more than this share of the time of an exchange.
DISTURBED = 0.5
_WIDTH = 512  # of the matrices whose products simulate training


class Measured(NamedTuple):
    """Measurements on one wire."""

    exchanges: list[tuple[float, float]]  # bytes and seconds in the background of each exchange
    overhead: float  # seconds of copies before and after one of the largest exchanges
    slowdown: float  # seconds by which one of the largest exchanges in flight slows computing
    noise: float = 0.0  # seconds between the quartiles of equal computations, of the worst node

    @property
    def largest(self) -> float:
        """Size of the largest exchanges in bytes."""
        return max(size for size, _ in self.exchanges)

    def times(self) -> list[float]:
        """Returns the times of the largest exchanges in seconds."""
        return [seconds for size, seconds in self.exchanges if size == self.largest]

    def costs(self, size: float) -> perf.WireCosts:
        """Returns the costs of an exchange of a size in bytes, in proportion to the largest."""
        share = size / self.largest
        seconds = statistics.median(self.times()) * share
        return perf.WireCosts(seconds, self.overhead * share, self.slowdown * share)


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="measure the network between nodes and recommend a wire, a period and a delay",
        description="Measures exchanges between the nodes for a minute or two. Prints latency, "
        "bandwidth, the costs of an exchange on each wire, and the recommended wire, period and "
        "delay. Start one process on each node, as for training.",
    )
    add_model(parser)
    add = parser.add_argument
    add("--step-time", type=float, help="seconds of a training step on one node")
    text = f"the only one to measure (default: {', '.join(COMPARED_WIRES)})"
    add("--wire", choices=FLOAT32_WIRES, help=text)
    add("--repeats", type=int, default=5, help="exchanges of each size (default: 5)")
    text = "time limit; sizes that would take longer are omitted (default: 60)"
    add("--seconds", type=float, default=60.0, help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, and prints the report on rank 0. Exits with an error if there is only one node."""
    valid = min(args.parameters, args.repeats, args.moments + 1) >= 1 and args.seconds > 0
    if not (valid and (args.step_time is None or 0 < args.step_time < math.inf)):
        raise SystemExit(
            "jdaso tune: --parameters and --repeats must be at least 1, --moments at least 0, "
            "--seconds above 0, and --step-time above 0 and finite; got "
            f"{args.parameters}, {args.repeats}, {args.moments}, {args.seconds} and "
            f"{args.step_time}."
        )
    topology = discover_topology()
    if topology.num_nodes == 1:
        raise SystemExit(
            f"jdaso tune: nothing to measure, there is only one node ({topology.host}). Start "
            "one process on each of several nodes: srun --ntasks-per-node=1 python -m jdaso tune "
            "..., or mpiexec -n 2 python -m jdaso tune ..."
        )
    try:
        exchange = mpi_exchange(topology, args.wire)
    except ValueError as error:
        raise SystemExit(f"jdaso tune: {error}") from error
    wires = (args.wire,) if args.wire else COMPARED_WIRES
    measured: dict[str, Measured] = {}
    seconds, largest, sizes = args.seconds / len(wires), args.parameters, 5
    for wire in wires:
        elements = sorted({max(1, largest // 4**k) for k in range(sizes)})
        measured[wire] = sweep(args, topology.group, exchange, wire, elements, seconds)
        # The other wires need no fit. They have the same size, which may be smaller for lack of
        # time.
        largest, sizes = round(measured[wire].largest / sent_bytes(args, 1, wire)), 1
    if topology.rank == 0:
        print(wrapped("\n".join(report(args, topology, measured))))


def sent_bytes(args: argparse.Namespace, elements: int, wire: str) -> float:
    return perf.wire_bytes(elements, wire, args.moments, args.moments_wire)


def report(
    args: argparse.Namespace, topology: Topology, measured: dict[str, Measured]
) -> list[str]:
    """Returns the lines that rank 0 prints."""
    nodes, (first, *_) = topology.num_nodes, measured
    size, largest = sent_bytes(args, args.parameters, first), measured[first].largest
    and_moments = moments_options = ""
    if args.moments:
        and_moments = f" with {args.moments} moments of each in {args.moments_wire}"
        moments_options = f" --moments {args.moments} --moments-wire {args.moments_wire}"
    lines = [
        f"{nodes} nodes; {args.parameters} parameters{and_moments}, {size / 1e6:.4g} MB in {first}"
        f"; {sum(len(found.exchanges) for found in measured.values())} exchanges in the background"
    ]
    network = None
    try:
        network = perf.fit(measured[first].exchanges, nodes)
    except ValueError as error:
        lines.append(f"bandwidth  unknown: {error}")
    else:
        bandwidth = f"{8e-9 * network.bandwidth:.3g}"
        lines += [
            f"latency    {network.latency:.3g} s, includes all that does not grow with the size",
            f"bandwidth  {bandwidth} Gbit/s",
        ]
    costs: dict[str, perf.WireCosts] = {}
    for wire, found in measured.items():
        wanted = sent_bytes(args, args.parameters, wire)
        costs[wire] = found.costs(wanted)
        if wanted > found.largest and network is not None:  # there was no time for this size
            seconds = perf.allreduce_time(wanted, nodes, network=network)
            costs[wire] = costs[wire]._replace(exchange_time=seconds)
    rows: list[tuple[str, ...]] = [("wire", "exchange, s", "copies, s", "slowdown, s")]
    rows += [(wire, *(f"{seconds:.3g}" for seconds in of)) for wire, of in costs.items()]
    if largest < size:
        lines.append(f"extrapolated from {largest / 1e6:.3g} MB")
    lines += [
        f"\n{text_table(rows)}\n",
        "Copies are the time of posting and merging. No delay hides it, and the time of the "
        "exchange does not include it. Slowdown is by how much computing takes longer while an "
        "exchange is in flight.",
    ]
    for wire, found in measured.items():
        times, texts = found.times(), []
        allowed = DISTURBED * statistics.median(times)
        if max(times) - min(times) > allowed:
            texts.append(f"equal exchanges in {wire} took {min(times):.3g} to {max(times):.3g} s")
        if found.noise > allowed:
            texts.append(f"equal computations with {wire} differed by {found.noise:.3g} s")
        if texts:
            lines.append(
                f"Unreliable: {' and '.join(texts)}, because hosts or network are busy with other "
                "work. Measure again without it."
            )
    lines.append("")
    exchange_time, overhead, slowdown = costs[first]
    if args.step_time is None:
        delays = [f"{d} for steps above {exchange_time / d:.3g} s" for d in (1, 2, 4)]
        lines.append(f"For a recommendation, give --step-time. Delay {', '.join(delays)}.")
    else:
        lines += advice(args.step_time, costs, nodes)
    if (hosts := len({process.host for process in topology.processes})) < nodes:
        lines.append(
            f"This did not measure a network: {nodes} nodes share {hosts} "
            f"host{'s' * (hosts > 1)}, so messages went through memory."
        )
    if network is not None:
        lines += [
            f"\nThe command has --overhead and --slowdown of {first} for all wires.",
            f"How it scales: python -m jdaso predict --parameters {args.parameters} "
            f"--step-time {args.step_time or 'SECONDS'} --bandwidth {bandwidth} "
            f"--latency {network.latency:.3g} --overhead {overhead:.3g} --slowdown {slowdown:.3g} "
            f"--max-nodes {4 * nodes}{moments_options}",
        ]
    return lines


def sweep(
    args: argparse.Namespace,
    group: Group,
    exchange: Exchange,
    wire: str,
    sizes: list[int],
    seconds: float,
) -> Measured:
    """Measures exchanges of some numbers of parameters, the smallest first. This is collective.

    The time of an exchange is the longest over all nodes, so all have the same numbers and stop at
    the same size after ``seconds``.
    """

    def longest(seconds: float) -> float:
        return max(group.gather(seconds))

    exchanges: list[tuple[float, float]] = []
    overheads: list[float] = []
    begin = time.monotonic()
    for elements in sizes:
        exchange_once = prepare(args, exchange, elements, wire)
        group.barrier("a measurement")
        # The first exchange compiles, and its memory is not mapped yet.
        expected = longest(exchange_once(lambda: None)[0])
        since, overheads = time.monotonic(), []
        for _ in range(args.repeats):
            group.barrier("a measurement")
            # Sleep, do not collect: while the program waits for a result, the progress thread
            # polls more often than beside training.
            sleep = functools.partial(time.sleep, 1.2 * expected)
            exchange_time, overhead = map(longest, exchange_once(sleep))
            exchanges.append((sent_bytes(args, elements, wire), exchange_time))
            overheads.append(overhead)
            expected = min(expected, exchange_time)
        # The next size takes about four times as long. Two sizes are needed.
        now = time.monotonic()
        until_next = longest(now - begin + 4 * (now - since))
        if until_next > seconds and len(exchanges) > args.repeats:
            break
    # Computing must last longer than the exchange, which it slows as well.
    compute = matrix_products(longest(1.5 * expected))
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(args.repeats):
        group.barrier("a measurement")
        alone.append(elapsed(compute))
        group.barrier("a measurement")
        exchange_once(lambda: beside.append(elapsed(compute)))
        if longest(time.monotonic() - begin) > seconds:
            break
    # The median of each node comes first: the longest single time may be a disturbance.
    slowdown = longest(statistics.median(beside) - statistics.median(alone))
    noise = 0.0
    if len(alone) > 1:
        quartiles = [statistics.quantiles(times, n=4) for times in (alone, beside)]
        noise = longest(max(high - low for low, _, high in quartiles))
    return Measured(exchanges, statistics.median(overheads), max(0.0, slowdown), noise)


def prepare(
    args: argparse.Namespace, exchange: Exchange, elements: int, wire: str
) -> Callable[[Callable[[], object]], tuple[float, float]]:
    """Makes a function ``exchange_once(meanwhile)`` for ``elements`` float32 parameters.

    It posts an exchange, calls ``meanwhile`` and merges the result, as DaSGD does. It returns the
    seconds the exchange was in flight, and the seconds of the copies before and after.
    """
    averaging = dasgd(exchange, schedule=constant(2, 1), wire=wire)
    assert averaging.engine is not None
    engine = averaging.engine._replace(moments_wire=args.moments_wire)

    # The steps of a training after the optimizer's update, which post and merge in turn.
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        return move(engine, params, state, jnp.bool_(True))

    first, *moments = (jnp.zeros(elements, jnp.float32) for _ in range(1 + args.moments))
    params: PyTree = ParamsWithMoments(first, moments)
    params, state = step(params, averaging.init(params))

    def exchange_once(meanwhile: Callable[[], object]) -> tuple[float, float]:
        nonlocal params, state
        before, start = exchange.report(), time.monotonic()
        params, state = jax.block_until_ready(step(params, state))
        posted = time.monotonic()
        meanwhile()
        resumed = time.monotonic()
        params, state = jax.block_until_ready(step(params, state))
        end, after = time.monotonic(), exchange.report()
        waited = after["seconds_blocked"] - before["seconds_blocked"]
        in_flight = after["seconds_in_flight"] - before["seconds_in_flight"]
        return in_flight, posted - start + end - resumed - waited

    return exchange_once


def matrix_products(seconds: float) -> Callable[[], object]:
    """Makes a function that multiplies matrices for ``seconds`` if no exchange is in flight."""
    matrix = jnp.full((_WIDTH, _WIDTH), 1 / _WIDTH)
    products = jax.jit(lambda m, n: jax.lax.fori_loop(0, n, lambda _, x: x @ m, m))
    few = 10
    products(matrix, few).block_until_ready()  # compiles
    number = max(1, round(few * seconds / elapsed(lambda: products(matrix, few))))
    return lambda: products(matrix, number)


def elapsed(compute: Callable[[], object]) -> float:
    """Returns the seconds until the arrays that ``compute`` returns are ready."""
    start = time.monotonic()
    jax.block_until_ready(compute())
    return time.monotonic() - start
