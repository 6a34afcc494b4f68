"""``python -m jdaso tune``: measures exchanges, and recommends wire, period and delay."""

import argparse
import math
import statistics
from typing import Any

from jdaso import perf
from jdaso.cluster.topology import Topology, discover_topology
from jdaso.core.command_line import text_table, wrapped
from jdaso.exchange.mpi import mpi_exchange
from jdaso.exchange.settings import SENDERS
from jdaso.perf.advice import COMPARED_WIRES, advice
from jdaso.perf.measure import Measured, sweep
from jdaso.perf.network import FLOAT32_WIRES
from jdaso.perf.predict_command import add_model, add_moments

HELP = "measure the network between nodes and recommend a wire, a period and a delay"
# A measurement was disturbed if equal exchanges, or the quartiles of equal computations, differ by
# more than this share of the time of an exchange.
DISTURBED = 0.5


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help=HELP,
        description="Measures exchanges between the nodes for a minute or two. Prints latency, "
        "bandwidth, the costs of an exchange on each wire, and the recommended wire, period and "
        "delay. Start one process on each node, as for training.",
    )
    add_model(parser)
    add, as_there = parser.add_argument, "as for jdaso.mpi_exchange (default: %(default)s)"
    add("--step-time", type=float, help="seconds of a training step on one node")
    add(
        "--wire",
        choices=FLOAT32_WIRES,
        help=f"the only one to measure (default: {', '.join(COMPARED_WIRES)})",
    )
    add_moments(parser)
    add("--senders", choices=SENDERS, default="one", help=as_there)
    add("--repeats", type=int, default=5, help="exchanges of each size (default: 5)")
    limit = "time limit; sizes that would take longer are omitted (default: 60)"
    add("--seconds", type=float, default=60.0, help=limit)
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
        exchange = mpi_exchange(topology, args.wire, senders=args.senders)
    except ValueError as error:
        raise SystemExit(f"jdaso tune: {error}") from error
    wires = (args.wire,) if args.wire else COMPARED_WIRES
    measured: dict[str, Measured] = {}
    elements, sizes, seconds = args.parameters, 5, args.seconds / len(wires)
    moments = args.moments, args.moments_wire
    for wire in wires:
        measured[wire] = found = sweep(
            topology, exchange, elements, wire, args.repeats, seconds, sizes, *moments
        )
        # The other wires need no fit. They have the same size, which may be smaller for lack of
        # time.
        elements, sizes = round(found.largest / perf.wire_bytes(1, wire, *moments)), 1
    if topology.rank == 0:
        print(wrapped("\n".join(report(args, topology, measured))))


def report(
    args: argparse.Namespace, topology: Topology, measured: dict[str, Measured]
) -> list[str]:
    """Returns the lines that rank 0 prints."""
    nodes, (first, *_) = topology.num_nodes, measured
    sizes = {
        wire: perf.wire_bytes(args.parameters, wire, args.moments, args.moments_wire)
        for wire in measured
    }
    and_moments, moments_options = "", ""
    if args.moments:
        and_moments = f" with {args.moments} moments of each in {args.moments_wire}"
        moments_options = f" --moments {args.moments} --moments-wire {args.moments_wire}"
    number = sum(len(found.exchanges) for found in measured.values())
    lines = [
        f"{nodes} nodes; {args.parameters} parameters{and_moments}, "
        f"{sizes[first] / 1e6:.4g} MB in {first}; "
        f"{number} exchanges in the background"
    ]
    network = None
    try:
        network = perf.fit(measured[first].exchanges, nodes)
    except ValueError as error:
        lines.append(f"bandwidth  unknown: {error}")
    else:
        lines += [
            f"latency    {network.latency:.3g} s, includes all that does not grow with the size",
            f"bandwidth  {8e-9 * network.bandwidth:.3g} Gbit/s",
        ]
    costs = {wire: costs_of(sizes[wire], found, nodes, network) for wire, found in measured.items()}
    rows: list[tuple[str, ...]] = [("wire", "exchange, s", "copies, s", "slowdown, s")]
    rows += [(wire, *(f"{seconds:.3g}" for seconds in costs[wire])) for wire in costs]
    largest = measured[first].largest
    if largest < sizes[first]:
        lines.append(f"extrapolated from {largest / 1e6:.3g} MB")
    lines += ["", text_table(rows), ""]
    lines.append(
        "Copies are the time of posting and merging. No delay hides it, and the time of the "
        "exchange does not include it. Slowdown is by how much computing takes longer while an "
        "exchange is in flight."
    )
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
    if args.step_time is None:
        seconds = costs[first].exchange_time
        delays = [f"{d} for steps above {seconds / d:.3g} s" for d in (1, 2, 4)]
        lines.append(f"For a recommendation, give --step-time. Delay {', '.join(delays)}.")
    else:
        lines += advice(args.step_time, costs, nodes)
    if (hosts := len({process.host for process in topology.processes})) < nodes:
        lines.append(
            f"This did not measure a network: {nodes} nodes share {hosts} "
            f"host{'s' * (hosts > 1)}, so messages went through memory."
        )
    if network is not None:
        overhead, slowdown = costs[first].overhead, costs[first].slowdown
        lines += [
            "",
            f"The command has --overhead and --slowdown of {first} for all wires.",
            f"How it scales: python -m jdaso predict --parameters {args.parameters} "
            f"--step-time {args.step_time or 'SECONDS'} --bandwidth {8e-9 * network.bandwidth:.3g} "
            f"--latency {network.latency:.3g} --overhead {overhead:.3g} --slowdown {slowdown:.3g} "
            f"--max-nodes {4 * nodes}{moments_options}",
        ]
    return lines


def costs_of(
    size: float, measured: Measured, nodes: int, network: perf.Network | None
) -> perf.WireCosts:
    """The costs of an exchange of ``size`` bytes, which may be more than were measured."""
    share = size / measured.largest
    exchange_time = statistics.median(measured.times()) * share
    if share > 1 and network is not None:
        exchange_time = perf.allreduce_time(size, nodes, network=network)
    return perf.WireCosts(exchange_time, measured.overhead * share, measured.slowdown * share)
