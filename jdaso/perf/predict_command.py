"""``python -m jdaso predict``: step times and scaling of all algorithms, as in DaSGD's Fig. 7."""

import argparse
import math
from pathlib import Path
from typing import Any

from jdaso import perf
from jdaso.core.block_format import FORMATS
from jdaso.core.chain import MOMENTS_WIRES
from jdaso.core.command_line import path_option, text_table, wrapped
from jdaso.perf.choice import COMPARED_WIRES, advice
from jdaso.perf.model import (
    FLOAT32_WIRES,
    MODELLED_PATTERNS,
    WITHOUT_FORMATS,
    Network,
    Prediction,
    exchange_seconds,
)

ALGORITHMS = ("allreduce_gradients", "local_sgd", "dasgd", "easgd", "daso", "diloco")
DILOCO_PERIOD = 500  # H of its paper, arXiv:2311.08105
HELP = "predict step times and scaling of all algorithms"
NOTES = """\
Columns: step time, and efficiency, which is the step time on one node divided by it (every node \
has a batch of its own). The period is {dasgd.period}, and {diloco.period} for diloco, which is \
made for 100 rounds or more; allreduce_gradients exchanges at every step. The delay is \
{dasgd.delay} for dasgd, {daso.delay} for daso, and the period for easgd; the others block. The \
wire is {wire}. \
{args.blocking_share:.0%} of daso's steps are warm-up and cool-down, which block as well. With \
dasgd, an exchange over {args.max_nodes} nodes takes {dasgd.exchange_time:.4g} s, which is \
{steps:.2g} steps."""
NO_COSTS = """\
--overhead and --slowdown are 0, so this does not include copies to the host, or the time that \
moving messages takes from computing. tune measures both."""
MOMENTS = """\
Exchanges have {0.moments} moments of each parameter in {0.moments_wire}, except for \
allreduce_gradients and easgd, which do not average them."""
NO_LATENCY = """\
--latency is 0, so messages take no time except for their bytes. tune measures it."""
NO_ROUNDING = """\
The pattern {} excludes int8 and float4, which are left out of the choice below."""
LOWER_BOUND = """\
This does not include MPI's time to process messages. With hundreds of nodes, compare --pattern \
ring, which counts a latency for each."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("predict", help=HELP)
    add_model(parser)
    add = parser.add_argument
    add("--step-time", type=float, required=True, help="seconds of a step on one node")
    add("--bandwidth", type=float, required=True, help="Gbit/s between nodes; see tune")
    add("--latency", type=float, default=0.0, help="seconds, between nodes; see tune (default: 0)")
    add("--gpus-per-node", type=int, default=1, help="requires --local-bandwidth (default: 1)")
    local_help = "Gbit/s between GPUs of a node (default: the step time includes it)"
    add("--local-bandwidth", type=float, default=math.inf, help=local_help)
    add("--max-nodes", type=nodes, default=8192, help="largest number of nodes (default: 8192)")
    add("--wire", choices=FLOAT32_WIRES, help="dtype between nodes (default: each algorithm's)")
    add_moments(parser)
    pattern_help = (
        "pattern of the all-reduce; the others are those of papers (default: %(default)s)"
    )
    add("--pattern", choices=MODELLED_PATTERNS, default="collectives", help=pattern_help)
    add("--period", type=int, help="(default: the recommended one for --max-nodes)")
    add("--delay", type=int, help="(default: period - 1 for dasgd, a quarter of it for daso)")
    overhead_help = "seconds of copies per exchange, which no delay hides; see tune (default: 0)"
    add("--overhead", type=float, default=0.0, help=overhead_help)
    slowdown_help = "seconds by which an exchange in flight slows computing; see tune (default: 0)"
    add("--slowdown", type=float, default=0.0, help=slowdown_help)
    share_help = "share of daso's steps in warm-up and cool-down, 0 to 1 (default: 8 of 90 epochs)"
    add("--blocking-share", type=float, default=8 / 90, help=share_help)
    add(
        "--out",
        type=path_option,
        help="file for the picture, requires matplotlib (default: predict.png)",
    )
    parser.set_defaults(run=run)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the two options for the size of a model, one of which is required."""
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--parameters", type=number, help="number of parameters, such as 25.6e6")
    text = "size of the float32 parameters instead of their number"
    add("--megabytes", dest="parameters", metavar="MB", type=megabytes, help=text)


def add_moments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for averaged moments."""
    add, text = parser.add_argument, "averaged moments of each parameter, 2 of Adam (default: 0)"
    add("--moments", type=int, default=0, help=text)
    wire_help = "as for jdaso.chain (default: %(default)s)"
    add("--moments-wire", choices=MOMENTS_WIRES, default="float32", help=wire_help)


# argparse shows the names of these functions in its errors: "invalid number value".
def number(text: str) -> int:
    """Parses a whole number, also in a form such as 25.6e6."""
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return round(float(text))


def megabytes(text: str) -> int:
    """Parses megabytes; returns the number of float32 parameters."""
    return number(str(float(text) * 250_000))


def nodes(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def run(args: argparse.Namespace) -> None:
    """Prints the table and draws the picture."""
    try:
        predictions = predict_all(args)
    except ValueError as error:
        raise SystemExit(f"jdaso predict: {error}") from error
    rows: list[tuple[str, ...]] = [("nodes", *ALGORITHMS)]
    for place, nodes in enumerate(node_counts(args.max_nodes)):
        cells = (predictions[name][place] for name in ALGORITHMS)
        rows.append((str(nodes), *(f"{p.step_time:.4g} s {p.efficiency:4.0%}" for p in cells)))
    print(text_table(rows))
    notes = NOTES.format(
        dasgd=predictions["dasgd"][-1],
        daso=predictions["daso"][-1],
        diloco=predictions["diloco"][-1],
        args=args,
        wire=args.wire or "float32, and bfloat16 for allreduce_gradients",
        steps=predictions["dasgd"][-1].exchange_time / predictions["dasgd"][0].step_time,
    )
    print(wrapped(f"\n{notes}"))
    if args.moments:
        print(wrapped(MOMENTS.format(args)))
    if args.overhead == args.slowdown == 0:
        print(wrapped(NO_COSTS))
    if args.latency == 0:
        print(wrapped(NO_LATENCY))
    if args.pattern == "collectives":
        print(wrapped(LOWER_BOUND))
    if args.pattern in WITHOUT_FORMATS:
        print(wrapped(NO_ROUNDING.format(args.pattern)))
    try:
        out = draw(predictions, node_counts(args.max_nodes), args.out or Path("predict.png"))
        print(f"\npicture: {out}")
    except ImportError:
        problem = "the picture requires matplotlib: pip install matplotlib"
        if args.out:
            raise SystemExit(f"jdaso predict: {problem}") from None
        print(f"\n{problem}")
    except (OSError, ValueError) as error:  # ValueError: an unknown suffix
        raise SystemExit(f"jdaso predict: {error}") from error
    # Last, because it ends with the line to copy.
    if args.period is None and args.delay is None and args.max_nodes > 1:
        print(wrapped(f"\nWith {args.max_nodes} nodes:"))
        step_time = predictions["dasgd"][0].step_time
        print(wrapped("\n".join(advice(step_time, wire_costs(args), args.max_nodes))))


def node_counts(most: int) -> list[int]:
    """Returns 1, 2, 4, ... and the largest number of nodes.

    >>> node_counts(12)
    [1, 2, 4, 8, 12]
    """
    return [2**k for k in range((most - 1).bit_length())] + [most]


def predict_all(args: argparse.Namespace) -> dict[str, list[Prediction]]:
    """Predicts all algorithms for all numbers of nodes."""
    network = Network(
        args.latency, args.bandwidth * 1e9 / 8, local_bandwidth=args.local_bandwidth * 1e9 / 8
    )
    if math.isfinite(args.local_bandwidth) != (args.gpus_per_node > 1):
        raise ValueError(
            "--gpus-per-node (above 1) and --local-bandwidth require each other. Without them, "
            "--step-time includes the communication within a node."
        )

    same = (
        *("step_time", "gpus_per_node", "wire", "moments_wire"),
        *("pattern", "overhead", "slowdown"),
    )
    options: dict[str, Any] = {name: getattr(args, name) for name in same}
    options |= {"num_parameters": args.parameters, "network": network}

    def predict(name: str, nodes: int, **schedule: Any) -> Prediction:
        moments = args.moments if perf.ALGORITHMS[name].moves_moments else 0
        return perf.predict(name, nodes, moments=moments, **options, **schedule)

    most = predict("dasgd", args.max_nodes, period=args.period, delay=args.delay)
    schedules: dict[str, dict[str, Any]] = {name: {"period": most.period} for name in ALGORITHMS}
    schedules["allreduce_gradients"] = {}
    schedules["dasgd"]["delay"] = most.delay
    schedules["daso"] |= {"delay": args.delay, "blocking_share": args.blocking_share}
    schedules["diloco"]["period"] = max(DILOCO_PERIOD, most.period)
    counts = node_counts(args.max_nodes)
    return {name: [predict(name, n, **schedules[name]) for n in counts] for name in ALGORITHMS}


def wire_costs(args: argparse.Namespace) -> dict[str, perf.WireCosts]:
    """Returns the costs of an exchange between all nodes on each wire."""
    network = Network(args.latency, args.bandwidth * 1e9 / 8)
    wires = (args.wire,) if args.wire else COMPARED_WIRES
    return {
        wire: perf.WireCosts(
            exchange_seconds(
                perf.wire_bytes(args.parameters, wire, args.moments, args.moments_wire),
                *(args.max_nodes, network, args.pattern),
            ),
            args.overhead,
            args.slowdown,
        )
        for wire in wires
        if wire not in FORMATS or args.pattern not in WITHOUT_FORMATS
    }


def draw(predictions: dict[str, list[Prediction]], counts: list[int], out: Path) -> Path:
    """Draws the parts of the step time of each algorithm, and the speed-up of all."""
    from matplotlib.figure import Figure

    # pyplot would need a display, or change the caller's backend.
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    places = range(len(counts))
    highest = max(p.step_time for points in predictions.values() for p in points)
    for panel, (name, points) in zip(panels, predictions.items(), strict=False):
        hidden = [p.hidden for p in points]
        waiting = [p.waiting for p in points]
        rest = [p.step_time - p.waiting for p in points]
        panel.bar(places, rest, color="tab:blue", label="everything else")
        panel.bar(places, hidden, color="none", hatch="////", label="hidden behind computing")
        panel.bar(places, waiting, bottom=rest, color="tab:red", label="waiting for other nodes")
        title = f"{name}, period {points[-1].period}, delay {points[-1].delay}"
        panel.set(title=title, xlabel="nodes", ylabel="step, s", ylim=(0, 1.05 * highest))
        panel.set_xticks(places[::2], [str(n) for n in counts[::2]], rotation=45)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    speedup, efficiency = panels[-2:]
    for panel in (speedup, efficiency):
        panel.set_xscale("log", base=2)
    speedup.set_yscale("log", base=2)
    speedup.plot(counts, counts, c="k", ls=":", label="linear")
    for place, (name, points) in enumerate(predictions.items()):
        style: dict[str, Any] = {"marker": ".", "ls": ("-", "--")[place % 2], "label": name}
        speedup.plot(counts, [p.speedup for p in points], **style)
        efficiency.plot(counts, [p.efficiency for p in points], **style)
    speedup.set(title="weak scaling", xlabel="nodes", ylabel="speed-up")
    efficiency.set(title="weak scaling", xlabel="nodes", ylabel="efficiency", ylim=(0, 1.05))
    speedup.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, format=out.suffix[1:] or "png")
    return out
