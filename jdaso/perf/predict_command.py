"""``python -m jdaso predict``: step times and scaling of all algorithms, as in DaSGD's Fig. 7.

``tune`` has the options for a model and the advice in common with it.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jdaso import perf
from jdaso.algorithms.progress import MEASURED_NODES, MEASURED_PERIOD
from jdaso.core.block_format import FORMATS
from jdaso.core.chain import MOMENTS_WIRES
from jdaso.core.command_line import path_option, text_table, wrapped
from jdaso.core.wire import block_bits
from jdaso.perf.model import (
    COMPARED_WIRES,
    FLOAT32_WIRES,
    MODELLED_PATTERNS,
    SPREAD,
    WITHOUT_FORMATS,
    Network,
    Prediction,
    Recommendation,
    WireCosts,
    exchange_seconds,
    recommend,
    wire_bytes,
)

ALGORITHMS = ("allreduce_gradients", "local_sgd", "dasgd", "easgd", "daso", "diloco")
DILOCO_PERIOD = 500  # H of its paper, arXiv:2311.08105
# The advice mentions a cost per step that exceeds this share of the step time.
_COSTLY = 0.05


def add_command(commands: Any) -> None:
    parser = commands.add_parser("predict", help="predict step times and scaling of all algorithms")
    add_model(parser)
    add = parser.add_argument
    add("--step-time", type=float, required=True, help="seconds of a step on one node")
    add("--bandwidth", type=float, required=True, help="Gbit/s between nodes; see tune")
    add("--latency", type=float, default=0.0, help="seconds, between nodes; see tune (default: 0)")
    add("--gpus-per-node", type=int, default=1, help="requires --local-bandwidth (default: 1)")
    text = "Gbit/s between GPUs of a node (default: the step time includes it)"
    add("--local-bandwidth", type=float, default=math.inf, help=text)
    add("--max-nodes", type=nodes, default=8192, help="largest number of nodes (default: 8192)")
    add("--wire", choices=FLOAT32_WIRES, help="dtype between nodes (default: each algorithm's)")
    text = "pattern of the all-reduce; the others are those of papers (default: %(default)s)"
    add("--pattern", choices=MODELLED_PATTERNS, default="collectives", help=text)
    add("--period", type=int, help="(default: the recommended one for --max-nodes)")
    add("--delay", type=int, help="(default: period - 1 for dasgd, a quarter of it for daso)")
    text = "seconds of copies per exchange, which no delay hides; see tune (default: 0)"
    add("--overhead", type=float, default=0.0, help=text)
    text = "seconds by which an exchange in flight slows computing; see tune (default: 0)"
    add("--slowdown", type=float, default=0.0, help=text)
    text = "share of daso's steps in warm-up and cool-down, 0 to 1 (default: 8 of 90 epochs)"
    add("--blocking-share", type=float, default=8 / 90, help=text)
    text = "file for the picture, requires matplotlib (default: predict.png)"
    add("--out", type=path_option, help=text)
    parser.set_defaults(run=run)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the size of a model and its averaged moments."""
    add = parser.add_mutually_exclusive_group(required=True).add_argument
    add("--parameters", type=number, help="number of parameters, such as 25.6e6")
    text = "size of the float32 parameters instead of their number"
    add("--megabytes", dest="parameters", metavar="MB", type=megabytes, help=text)
    add, text = parser.add_argument, "averaged moments of each parameter, 2 of Adam (default: 0)"
    add("--moments", type=int, default=0, help=text)
    text = "as for jdaso.chain (default: %(default)s)"
    add("--moments-wire", choices=MOMENTS_WIRES, default="float32", help=text)


# argparse shows the names of these functions in its errors: "invalid number value".
def number(text: str) -> int:
    """Parses an integer, also in a form such as 25.6e6."""
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
    counts = node_counts(args.max_nodes)
    if args.out and not args.out.parent.is_dir():
        raise SystemExit(
            f"jdaso predict: --out must name a file in a folder that exists, got {args.out}: make "
            f"{args.out.parent} first, or choose another one."
        )
    try:
        predictions = predict_all(args)
    except ValueError as error:
        raise SystemExit(f"jdaso predict: {error}") from error
    rows: list[tuple[str, ...]] = [("nodes", *ALGORITHMS)]
    for place, count in enumerate(counts):
        cells = (predictions[name][place] for name in ALGORITHMS)
        rows.append((str(count), *(f"{p.step_time:.4g} s {p.efficiency:4.0%}" for p in cells)))
    print(text_table(rows))
    print(wrapped("\n" + "\n".join(notes(args, predictions))))
    try:
        out = args.out or Path("predict.png")
        draw(predictions, counts, out)
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
        advised = advice(predictions["dasgd"][0].step_time, wire_costs(args), args.max_nodes)
        print(wrapped("\n".join([f"\nWith {args.max_nodes} nodes:", *advised])))


def node_counts(most: int) -> list[int]:
    """Returns 1, 2, 4, ... and the largest number of nodes.

    >>> node_counts(12)
    [1, 2, 4, 8, 12]
    """
    return [2**k for k in range((most - 1).bit_length())] + [most]


def predict_all(args: argparse.Namespace) -> dict[str, list[Prediction]]:
    """Predicts all algorithms for all numbers of nodes."""
    if math.isfinite(args.local_bandwidth) != (args.gpus_per_node > 1):
        raise ValueError(
            "--gpus-per-node (above 1) and --local-bandwidth require each other. Without them, "
            "--step-time includes the communication within a node."
        )
    local = args.local_bandwidth * 1e9 / 8
    network = Network(args.latency, args.bandwidth * 1e9 / 8, local_bandwidth=local)

    def predict(name: str, nodes: int, **schedule: Any) -> Prediction:
        return perf.predict(
            name,
            nodes,
            num_parameters=args.parameters,
            step_time=args.step_time,
            network=network,
            gpus_per_node=args.gpus_per_node,
            wire=args.wire,
            pattern=args.pattern,
            overhead=args.overhead,
            slowdown=args.slowdown,
            moments=args.moments if perf.ALGORITHMS[name].moves_moments else 0,
            moments_wire=args.moments_wire,
            **schedule,
        )

    most = predict("dasgd", args.max_nodes, period=args.period, delay=args.delay)
    schedules: dict[str, dict[str, Any]] = {name: {"period": most.period} for name in ALGORITHMS}
    schedules["allreduce_gradients"] = {}
    schedules["dasgd"]["delay"] = most.delay
    schedules["daso"] |= {"delay": args.delay, "blocking_share": args.blocking_share}
    schedules["diloco"]["period"] = max(DILOCO_PERIOD, most.period)
    counts = node_counts(args.max_nodes)
    return {name: [predict(name, n, **schedules[name]) for n in counts] for name in ALGORITHMS}


def notes(args: argparse.Namespace, predictions: Mapping[str, list[Prediction]]) -> list[str]:
    """Returns lines that say what the table shows, and what it leaves out."""
    dasgd, daso, diloco = (predictions[name][-1] for name in ("dasgd", "daso", "diloco"))
    wire = args.wire or "float32, and bfloat16 for allreduce_gradients"
    lines = [
        "Columns: step time, and efficiency, which is the step time on one node divided by it "
        f"(every node has a batch of its own). The period is {dasgd.period}, and {diloco.period} "
        "for diloco, which is made for 100 rounds or more; allreduce_gradients exchanges at every "
        f"step. The delay is {dasgd.delay} for dasgd, {daso.delay} for daso, and the period for "
        f"easgd; the others block. The wire is {wire}. {args.blocking_share:.0%} of daso's steps "
        "are warm-up and cool-down, which block as well. With dasgd, an exchange over "
        f"{args.max_nodes} nodes takes {dasgd.exchange_time:.4g} s, which is "
        f"{dasgd.exchange_time / predictions['dasgd'][0].step_time:.2g} steps."
    ]
    if args.moments:
        lines.append(
            f"Exchanges have {args.moments} moments of each parameter in {args.moments_wire}, "
            "except for allreduce_gradients and easgd, which do not average them."
        )
    if args.overhead == args.slowdown == 0:
        lines.append(
            "--overhead and --slowdown are 0, so this does not include copies to the host, or the "
            "time that moving messages takes from computing. tune measures both."
        )
    if args.latency == 0:
        lines.append(
            "--latency is 0, so messages take no time except for their bytes. tune measures it."
        )
    if args.pattern == "collectives":
        lines.append(
            "This does not include MPI's time to process messages. With hundreds of nodes, compare "
            "--pattern ring, which counts a latency for each."
        )
    if args.pattern in WITHOUT_FORMATS:
        lines.append(
            f"The pattern {args.pattern} excludes int8 and float4, which are left out of the "
            "choice below."
        )
    return lines


def wire_costs(args: argparse.Namespace) -> dict[str, WireCosts]:
    """Returns the costs of an exchange between all nodes on each wire."""
    network, costs = Network(args.latency, args.bandwidth * 1e9 / 8), {}
    for wire in (args.wire,) if args.wire else COMPARED_WIRES:
        if wire not in FORMATS or args.pattern not in WITHOUT_FORMATS:
            size = wire_bytes(args.parameters, wire, args.moments, args.moments_wire)
            seconds = exchange_seconds(size, args.max_nodes, network, args.pattern)
            costs[wire] = WireCosts(seconds, args.overhead, args.slowdown)
    return costs


def advice(step_time: float, costs: Mapping[str, WireCosts], nodes: int) -> list[str]:
    """Returns lines that recommend a setting, say what to expect of it, and name two alternatives.

    >>> lines = advice(0.17, {"bfloat16": WireCosts(0.32, slowdown=0.03)}, nodes=2)
    >>> lines[0].split(":")[0]
    'Choose daso with merge delta, wire bfloat16, period 5, delay 2'
    """

    def expected(found: Recommendation) -> str:
        merge = f" with merge {found.merge}" if found.delay else ""
        return (
            f"{found.algorithm}{merge}, wire {found.wire}, period {found.period}, delay "
            f"{found.delay}: a step takes {found.step_time:.3g} s "
            f"({found.step_time / step_time - 1:+.1%}) and is worth {found.progress:.2f} steps of "
            "synchronous training."
        )

    best, *others = recommend(step_time, costs, nodes)
    lines = [f"Choose {expected(best)}", *(f"Or {expected(other)}" for other in others)]
    lines.append(
        "Settings are compared by step time divided by this progress, the mean over small "
        "trainings and three learning rates. That of your training differs, typically by "
        f"{SPREAD:.0%}. Rounding counts as nothing, except for the time of copies."
    )
    if best.period > MEASURED_PERIOD or nodes > MEASURED_NODES:
        lines.append(
            f"Progress was measured up to period {MEASURED_PERIOD} and {MEASURED_NODES} nodes. "
            "Beyond, it is an extrapolation: choose a larger batch per node, or diloco, which is "
            "made for long periods."
        )
    if bits := block_bits(best.wire):
        lines.append(
            f"{best.wire} rounds changes to {bits} bits, and sends the errors later. In the "
            "measurements of jdaso this cost DASO half a point of accuracy on images. On text it "
            "was measured with Streaming DiLoCo only, and cost less than the noise of the seeds."
        )
        if exact := {wire: each for wire, each in costs.items() if not block_bits(wire)}:
            found = recommend(step_time, exact, nodes)[0]
            lines.append(f"Without this rounding, choose {expected(found)}")
    _, overhead, slowdown = (
        seconds / (step_time * best.period) for seconds in costs[best.wire]
    )  # as shares of the steps of a period
    if overhead > _COSTLY:
        lines.append(
            f"Posting and merging lengthen steps by {overhead:.1%} on average, which no delay "
            "hides."
        )
    if slowdown > _COSTLY:
        lines.append(
            f"Moving messages on the same cores lengthens steps by {slowdown:.1%} on average. "
            "Give each process one more core (srun --cpus-per-task)."
        )
    return [*lines, f"\n{best.code}"]


def draw(predictions: dict[str, list[Prediction]], counts: list[int], out: Path) -> None:
    """Draws the parts of the step time of each algorithm, and the speed-up of all."""
    from matplotlib.figure import Figure

    # pyplot would need a display, or change the caller's backend.
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    *panels, speedup, efficiency = figure.subplots(2, 4).flatten()
    places = range(len(counts))
    highest = max(p.step_time for points in predictions.values() for p in points)
    for panel, (name, points) in zip(panels, predictions.items(), strict=True):
        hidden, waiting = [p.hidden for p in points], [p.waiting for p in points]
        rest = [p.step_time - p.waiting for p in points]
        panel.bar(places, rest, color="tab:blue", label="everything else")
        panel.bar(places, hidden, color="none", hatch="////", label="hidden behind computing")
        panel.bar(places, waiting, bottom=rest, color="tab:red", label="waiting for other nodes")
        title = f"{name}, period {points[-1].period}, delay {points[-1].delay}"
        panel.set(title=title, xlabel="nodes", ylabel="step, s", ylim=(0, 1.05 * highest))
        panel.set_xticks(places[::2], [str(n) for n in counts[::2]], rotation=45)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    speedup.loglog(counts, counts, base=2, c="k", ls=":", label="linear")
    for place, (name, points) in enumerate(predictions.items()):
        style: dict[str, Any] = {"marker": ".", "ls": ("-", "--")[place % 2], "label": name}
        speedup.plot(counts, [p.speedup for p in points], **style)
        efficiency.semilogx(counts, [p.efficiency for p in points], base=2, **style)
    speedup.set(title="weak scaling", xlabel="nodes", ylabel="speed-up")
    efficiency.set(title="weak scaling", xlabel="nodes", ylabel="efficiency", ylim=(0, 1.05))
    speedup.legend(fontsize="small")
    figure.savefig(out, dpi=150, format=out.suffix[1:] or "png")
