"""``python -m jdaso tune``: measures exchanges between the nodes, and says what to choose."""

from __future__ import annotations

import argparse
import math
import statistics
from typing import Any

from jdaso import perf
from jdaso._predict import add_model
from jdaso._sweep import Measured, sweep
from jdaso.exchange._all_reduce import PATTERNS
from jdaso.exchange._mpi import SENDERS, mpi_exchange
from jdaso.topology import Topology, discover_topology

HELP = "measure the network between nodes; say which period and delay to choose"
WIRES = ("float32", "bfloat16", "float16", "int8")
# Up to these delays the papers saw little loss of accuracy beside the same period without delay.
HARMLESS = {"DASO, Table 2": 4, "DaSGD, Fig. 6(e)": 7}
# Below this share of a step, what is gained by hiding exchanges is not worth it.
WORTHWHILE = 0.01
# Above this share of the time, what no delay hides is worth a word.
COSTLY = 0.05
# (slowest - fastest) / median of the same exchange; above, something else is going on.
DISTURBED = 0.5


def add_command(commands: Any) -> None:
    """Adds the subcommand to a parser."""
    parser = commands.add_parser(
        "tune",
        help=HELP,
        description="Measures exchanges between the nodes, a minute or two, and prints latency, "
        "bandwidth, what an exchange costs, and which period and delay to choose. Start one "
        "process on each node, as for training.",
    )
    add_model(parser, required=True)
    add = parser.add_argument
    add("--step-time", type=float, help="seconds of a training step on one node")
    add("--wire", choices=WIRES, default="float32", help="(default: float32)")
    add(
        "--pattern",
        choices=PATTERNS,
        default="direct",
        help="of jdaso.mpi_exchange (default: direct)",
    )
    add("--senders", choices=SENDERS, default="one", help="the same (default: one)")
    add("--repeats", type=int, default=5, help="exchanges of each size (default: 5)")
    add(
        "--seconds",
        type=float,
        default=60.0,
        help="to measure for; sizes that would take longer are left out (default: 60)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Measures, and prints on rank 0; ends with an error if there is only one node."""
    right = args.parameters >= 1 and args.repeats >= 1 and args.seconds > 0
    if not (right and (args.step_time is None or 0 < args.step_time < math.inf)):
        raise SystemExit(
            "jdaso tune: --parameters and --repeats must be at least 1, --seconds and --step-time "
            f"above 0, and the last finite; got {args.parameters}, {args.repeats}, {args.seconds} "
            f"and {args.step_time}."
        )
    topology = discover_topology()
    if topology.num_nodes == 1:
        raise SystemExit(
            f"jdaso tune: nothing to measure, there is only one node ({topology.host}). Start "
            "one process on each of several: srun --ntasks-per-node=1 python -m jdaso tune ..., "
            "or mpiexec -n 2 python -m jdaso tune ..."
        )
    try:
        exchange = mpi_exchange(topology, args.wire, pattern=args.pattern, senders=args.senders)
    except ValueError as error:
        raise SystemExit(f"jdaso tune: {error}") from error
    measured = sweep(topology, exchange, args.parameters, args.wire, args.repeats, args.seconds)
    if topology.rank == 0:
        print("\n".join(lines(args, topology, measured)))


def lines(args: argparse.Namespace, topology: Topology, measured: Measured) -> list[str]:
    """What rank 0 prints."""
    nodes, size = topology.num_nodes, perf.wire_bytes(args.parameters, args.wire)
    times, share = measured.times(), size / measured.largest
    median = statistics.median(times)
    overhead, slowdown = measured.overhead * share, measured.slowdown * share
    said = [
        f"{nodes} nodes; {args.parameters} parameters, {size / 1e6:.4g} MB in {args.wire}; "
        f"{len(measured.exchanges)} exchanges in the background"
    ]
    exchange_time, next_command = median * share, ""
    try:
        network = perf.fit(measured.exchanges, nodes, args.pattern)
    except ValueError as error:
        said.append(f"bandwidth  unknown: {error}")
    else:
        if share > 1:
            exchange_time = perf.allreduce_time(size, nodes, network=network, pattern=args.pattern)
        said.append(
            f"latency    {network.latency:.3g} s, with all that does not grow with the size"
        )
        said.append(f"bandwidth  {8e-9 * network.bandwidth:.3g} Gbit/s")
        next_command = (
            f"\nHow it scales: python -m jdaso predict --parameters {args.parameters} "
            f"{f'--wire {args.wire} ' * (args.wire != 'float32')}"
            f"{f'--pattern {args.pattern} ' * (args.pattern != 'direct')}--step-time "
            f"{args.step_time or 'SECONDS'} --bandwidth {8e-9 * network.bandwidth:.3g} "
            f"--latency {network.latency:.3g} --overhead {overhead:.3g} --slowdown {slowdown:.3g}"
        )
        if args.step_time is not None:
            period, delay = perf.recommend(args.step_time, exchange_time)
            next_command += f" --period {period} --delay {delay}"
    known = "" if share == 1 else f", extrapolated from {measured.largest / 1e6:.4g} MB"
    said.append(f"exchange   {exchange_time:.4g} s{known}")
    said.append(f"copies     {overhead:.3g} s per exchange, which no delay hides")
    said.append(f"slowdown   {slowdown:.3g} s of computing beside an exchange in flight\n")
    if max(times) - min(times) > DISTURBED * median:
        said.append(
            f"Not to be trusted: the same exchange took {min(times):.3g} to {max(times):.3g} s. "
            "Hosts or network are busy with something else; measure again without it."
        )
    if args.step_time is None:
        delays = [f"{d} for steps above {exchange_time / d:.3g} s" for d in (1, 2, 4)]
        said.append(f"Give --step-time to be told what to choose; delay {', '.join(delays)}.")
    else:
        said += advice(args.step_time, exchange_time, overhead, slowdown, args.wire)
    hosts = len({process.host for process in topology.processes})
    if hosts < nodes:
        said.append(
            f"Not a network: {nodes} nodes share {hosts} host{'s' * (hosts > 1)}, so messages "
            "went through memory."
        )
    return [*said, next_command]


def advice(
    step_time: float, exchange_time: float, overhead: float, slowdown: float, wire: str
) -> list[str]:
    """Period and delay, why, what to expect of them, and when they will not help.

    >>> advice(step_time=0.1, exchange_time=0.15, overhead=0.0, slowdown=0.0, wire="int8")[0][:52]
    'Choose period 3, delay 2, as in jdaso.dasgd(exchange'
    """
    period, delay = perf.recommend(step_time, exchange_time)

    def expected(period: int, delay: int) -> float:
        hidden = min(1.0, delay * step_time / exchange_time)
        step = perf.mean_step_time(step_time, exchange_time, period, delay)
        return step + (overhead + hidden * slowdown) / period

    def told(seconds: float) -> str:
        return f"{seconds:.4g} s ({seconds / step_time - 1:+.1%})"

    hiding, waiting, at_once = expected(period, delay), expected(period, 0), expected(1, 0)
    said, choose = [], "Choose"
    if at_once <= (1 + WORTHWHILE) * hiding:
        choose = "To hide them all the same, choose"
        said.append(
            f"It will not help: a step takes {told(at_once)} if an exchange is waited for at every "
            "step (period 1, delay 0), and then nothing is stale."
        )
    elif waiting <= hiding:
        choose = "To hide them all the same, choose"
        said.append(
            "It will not help: beside an exchange computing takes longer by more than waiting for "
            f"it does. Wait for them, with period {period}, delay 0: {told(waiting)}."
        )
    said += [
        f"{choose} period {period}, delay {delay}, as in jdaso.dasgd(exchange, period={period}, "
        f"delay={delay}, wire='{wire}'), or for jdaso.daso in its schedule, jdaso.cycling(period="
        f"{period}, delay={delay}, ...): an exchange takes {exchange_time / step_time:.3g} steps, "
        f"so it has arrived after {delay} (DaSGD Eq. 3); periods longer than delay + 1 cost "
        "accuracy (Sec. VI-D).",
        f"A step of {step_time:.4g} s then takes {told(hiding)}; waiting for exchanges, "
        f"{told(at_once)} with one at every step, {told(waiting)} with period {period}.",
    ]
    narrower = "" if wire == "int8" else "a narrower wire or "
    beyond = [f"{paper}: up to {most}" for paper, most in HARMLESS.items() if delay > most]
    if beyond:
        said.append(
            f"It may cost accuracy: delay {delay} is longer than those that cost little more than "
            f"their period did in the papers ({'; '.join(beyond)}). Take {narrower}a larger batch "
            "per node, or diloco, which is made for long periods."
        )
    if overhead > COSTLY * step_time * period:
        said.append(
            "Copies to and from the host lengthen steps by "
            f"{overhead / (step_time * period):.1%} on average, which no delay hides. A longer "
            "period makes them fewer, and may cost accuracy."
        )
    if slowdown > COSTLY * step_time * period:
        said.append(
            f"Moving messages lengthens steps by {slowdown / (step_time * period):.1%} on average, "
            f"on the same cores. Take {narrower}one core more (srun --cpus-per-task)."
        )
    return said
