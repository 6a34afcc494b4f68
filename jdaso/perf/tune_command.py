"""``python -m jdaso tune``: measures exchanges between nodes and recommends period and delay."""

import argparse
import math
import statistics
from typing import Any

from jdaso import perf
from jdaso.cluster.topology import Topology, discover_topology
from jdaso.exchange.mpi import mpi_exchange
from jdaso.exchange.settings import SENDERS
from jdaso.perf.measure import Measured, sweep
from jdaso.perf.network import FLOAT32_WIRES
from jdaso.perf.predict_command import add_model
from jdaso.perf.text_table import wrapped

HELP = "measure the network between nodes and recommend a period and a delay"
# Longest delays in the papers with little loss of accuracy compared to delay 0, same period.
HARMLESS = {"DASO, Table 2": 4, "DaSGD, Fig. 6(e)": 7}
# Hiding exchanges is not worthwhile if it saves less than this share of a step.
WORTHWHILE = 0.01
# The output mentions a cost per step that exceeds this share of the step time.
COSTLY = 0.05
# (slowest - fastest) / median of equal exchanges. A larger ratio means a disturbed measurement.
DISTURBED = 0.5


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help=HELP,
        description="Measures exchanges between the nodes for a minute or two. Prints latency, "
        "bandwidth, the costs of an exchange, and the recommended period and delay. Start one "
        "process on each node, as for training.",
    )
    add_model(parser)
    add, as_there = parser.add_argument, "as for jdaso.mpi_exchange (default: %(default)s)"
    add("--step-time", type=float, help="seconds of a training step on one node")
    add("--wire", choices=FLOAT32_WIRES, default="float32", help="(default: float32)")
    add("--senders", choices=SENDERS, default="one", help=as_there)
    add("--repeats", type=int, default=5, help="exchanges of each size (default: 5)")
    limit = "time limit; sizes that would take longer are omitted (default: 60)"
    add("--seconds", type=float, default=60.0, help=limit)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, and prints the report on rank 0. Exits with an error if there is only one node."""
    valid = args.parameters >= 1 and args.repeats >= 1 and args.seconds > 0
    if not (valid and (args.step_time is None or 0 < args.step_time < math.inf)):
        raise SystemExit(
            "jdaso tune: --parameters and --repeats must be at least 1, --seconds above 0, and "
            f"--step-time above 0 and finite; got {args.parameters}, {args.repeats}, "
            f"{args.seconds} and {args.step_time}."
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
    measured = sweep(topology, exchange, args.parameters, args.wire, args.repeats, args.seconds)
    if topology.rank == 0:
        print(wrapped("\n".join(report(args, topology, measured))))


def report(args: argparse.Namespace, topology: Topology, measured: Measured) -> list[str]:
    """Returns the lines that rank 0 prints."""
    nodes, size = topology.num_nodes, perf.wire_bytes(args.parameters, args.wire)
    times, share = measured.times(), size / measured.largest
    median = statistics.median(times)
    overhead, slowdown = measured.overhead * share, measured.slowdown * share
    lines = [
        f"{nodes} nodes; {args.parameters} parameters, {size / 1e6:.4g} MB in {args.wire}; "
        f"{len(measured.exchanges)} exchanges in the background"
    ]
    exchange_time, next_command = median * share, ""
    try:
        network = perf.fit(measured.exchanges, nodes)
    except ValueError as error:
        lines.append(f"bandwidth  unknown: {error}")
    else:
        if share > 1:
            exchange_time = perf.allreduce_time(size, nodes, network=network)
        lines += [
            f"latency    {network.latency:.3g} s, includes all that does not grow with the size",
            f"bandwidth  {8e-9 * network.bandwidth:.3g} Gbit/s",
        ]
        next_command = (
            f"\nHow it scales: python -m jdaso predict --parameters {args.parameters} "
            f"{f'--wire {args.wire} ' * (args.wire != 'float32')}"
            f"--step-time {args.step_time or 'SECONDS'} --bandwidth {8e-9 * network.bandwidth:.3g} "
            f"--latency {network.latency:.3g} --overhead {overhead:.3g} --slowdown {slowdown:.3g}"
        )
        if args.step_time is not None:
            period, delay = perf.recommend(args.step_time, exchange_time)
            next_command += f" --period {period} --delay {delay}"
    known = "" if share == 1 else f", extrapolated from {measured.largest / 1e6:.4g} MB"
    lines.append(f"exchange   {exchange_time:.4g} s{known}")
    lines.append(f"copies     {overhead:.3g} s per exchange, which no delay hides")
    lines.append(f"slowdown   {slowdown:.3g} s of computing per exchange in flight\n")
    if max(times) - min(times) > DISTURBED * median:
        lines.append(
            f"Unreliable: equal exchanges took {min(times):.3g} to {max(times):.3g} s, because "
            "hosts or network are busy with other work. Measure again without it."
        )
    if args.step_time is None:
        delays = [f"{d} for steps above {exchange_time / d:.3g} s" for d in (1, 2, 4)]
        lines.append(f"For a recommendation, give --step-time. Delay {', '.join(delays)}.")
    else:
        lines += advice(args.step_time, exchange_time, overhead, slowdown, args.wire)
    if (hosts := len({process.host for process in topology.processes})) < nodes:
        lines.append(
            f"This did not measure a network: {nodes} nodes share {hosts} "
            f"host{'s' * (hosts > 1)}, so messages went through memory."
        )
    return [*lines, next_command]


def advice(
    step_time: float, exchange_time: float, overhead: float, slowdown: float, wire: str
) -> list[str]:
    """Recommends period and delay, with reasons, expected step times, and warnings.

    >>> advice(step_time=0.1, exchange_time=0.15, overhead=0.0, slowdown=0.0, wire="int8")[0][:52]
    'Choose period 3, delay 2, as in jdaso.dasgd(exchange'
    """
    period, delay = perf.recommend(step_time, exchange_time)

    def expected(period: int, delay: int) -> float:
        hidden = min(1.0, delay * step_time / exchange_time)
        step = perf.mean_step_time(step_time, exchange_time, period, delay)
        return step + (overhead + hidden * slowdown) / period

    def with_change(seconds: float) -> str:
        return f"{seconds:.4g} s ({seconds / step_time - 1:+.1%})"

    hiding, waiting, at_once = expected(period, delay), expected(period, 0), expected(1, 0)
    lines, choose = [], "Choose"
    if at_once <= (1 + WORTHWHILE) * hiding:
        choose = "To hide exchanges nevertheless, choose"
        lines.append(
            f"A delay is not worthwhile: with an exchange at every step (period 1, delay 0) a step "
            f"takes {with_change(at_once)}, and nothing is stale."
        )
    elif waiting <= hiding:
        choose = "To hide exchanges nevertheless, choose"
        lines.append(
            "A delay is not worthwhile: an exchange in flight slows computing by more than waiting "
            f"for it takes. Choose period {period}, delay 0: {with_change(waiting)}."
        )
    lines += [
        f"{choose} period {period}, delay {delay}, as in jdaso.dasgd(exchange, period={period}, "
        f"delay={delay}, wire='{wire}'), or for jdaso.daso in its schedule, jdaso.cycling(period="
        f"{period}, delay={delay}, ...). An exchange takes {exchange_time / step_time:.3g} steps, "
        f"so it is complete after {delay} (DaSGD Eq. 3). Periods longer than delay + 1 cost "
        "accuracy (Sec. VI-D).",
        f"A step of {step_time:.4g} s then takes {with_change(hiding)}. With blocking exchanges it "
        f"takes {with_change(at_once)} with period 1, and {with_change(waiting)} with period "
        f"{period}.",
    ]
    narrower = "" if wire == "int8" else "a narrower wire or "
    beyond = [f"{paper}: up to {most}" for paper, most in HARMLESS.items() if delay > most]
    if beyond:
        lines.append(
            f"Delay {delay} may cost accuracy: it exceeds the delays that cost little accuracy in "
            f"the papers ({'; '.join(beyond)}). Choose {narrower}a larger batch per node, or "
            "diloco, which is made for long periods."
        )
    if overhead > COSTLY * step_time * period:
        lines.append(
            "Copies to and from the host lengthen steps by "
            f"{overhead / (step_time * period):.1%} on average, which no delay hides. A longer "
            "period reduces them, and may cost accuracy."
        )
    if slowdown > COSTLY * step_time * period:
        lines.append(
            f"Moving messages on the same cores lengthens steps by "
            f"{slowdown / (step_time * period):.1%} on average. Choose {narrower}one more core "
            "(srun --cpus-per-task)."
        )
    return lines
