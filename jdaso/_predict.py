"""``python -m jdaso predict``: step times and scaling of all algorithms, as DaSGD's Fig. 7."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from jdaso import perf
from jdaso.perf import Network, Prediction

DRAWN = ("allreduce_gradients", "local_sgd", "dasgd", "easgd", "daso", "diloco")
DILOCO_PERIOD = 500  # H of its paper, arXiv:2311.08105
HELP = "predict step times and scaling of all algorithms"
NOTES = """\
Step time, and efficiency: the step time on one node divided by it, every node having its own \
batch. The period is {period}, of diloco {diloco}; allreduce_gradients exchanges at every step. \
The delay is {delay} with dasgd, {daso} with daso, the whole period with easgd; the others wait. \
The wire is {wire}. Of daso's steps {share:.0%} are warm-up and cool-down, and wait as well. An \
exchange over {nodes} nodes takes {seconds:.4g} s with dasgd, which is {steps:.2g} steps."""
OF_NOTHING = """\
--overhead and --slowdown are 0, so copies, and what moving messages takes from computing, are not \
counted; tune measures them."""
OF_DIRECT = """\
The time that a node needs for its 2 (P-1) messages is not counted; with hundreds of nodes look at \
--pattern ring, too, which counts a latency for each."""


def add_command(commands: Any) -> None:
    """Adds the subcommand to a parser."""
    parser = commands.add_parser("predict", help=HELP)
    add_model(parser, required=True)
    add = parser.add_argument
    add("--step-time", type=float, required=True, help="seconds of a step on one node")
    add("--bandwidth", type=float, required=True, help="Gbit/s between nodes; see tune")
    add("--latency", type=float, default=0.0, help="seconds, between nodes; see tune (default: 0)")
    add("--gpus-per-node", type=int, default=1, help="goes with --local-bandwidth (default: 1)")
    add(
        "--local-bandwidth",
        type=float,
        default=math.inf,
        help="Gbit/s between GPUs of a node (default: the step time has all that happens there)",
    )
    add("--max-nodes", type=nodes, default=4096, help="the most (default: 4096)")
    wires = [wire for wire in perf.BYTES if wire != "float64"]  # no leaf crosses wider than it is
    add("--wire", choices=wires, help="(default: each algorithm's own)")
    add(
        "--pattern",
        choices=perf.PATTERNS,
        default="direct",
        help="of the all-reduce (default: direct); tree and butterfly are those of DaSGD's paper",
    )
    add("--period", type=int, help="(default: what is recommended for the most nodes)")
    add("--delay", type=int, help="(default: period - 1 for dasgd, a quarter of it for daso)")
    add(
        "--overhead",
        type=float,
        default=0.0,
        help="seconds of copies per exchange, which nothing hides; see tune (default: 0)",
    )
    add(
        "--slowdown",
        type=float,
        default=0.0,
        help="seconds by which computing beside an exchange takes longer; see tune (default: 0)",
    )
    add(
        "--blocking-share",
        type=float,
        default=1 / 9,
        help="of daso's steps, those of warm-up and cool-down, 0 to 1 (default: 10 of 90 epochs)",
    )
    add("--out", type=Path, help="picture to write, with matplotlib (default: predict.png)")
    parser.set_defaults(run=run)


def add_model(parser: argparse.ArgumentParser, required: bool) -> None:
    """Adds the two ways to say how large a model is."""
    size = parser.add_mutually_exclusive_group(required=required)
    size.add_argument("--parameters", type=number, help="of the model, such as 25.6e6")
    size.add_argument(
        "--megabytes",
        dest="parameters",
        metavar="MB",
        type=megabytes,
        help="the same as the size of its float32 parameters",
    )


# argparse names what is wrong by these functions' names: "invalid number value".
def number(text: str) -> int:
    """A whole number, which may be written as 25.6e6."""
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return round(float(text))


def megabytes(text: str) -> int:
    """The float32 parameters in so many megabytes."""
    return number(str(float(text) * 250_000))


def nodes(text: str) -> int:
    """A number of nodes."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def run(args: argparse.Namespace) -> None:
    """Prints a table and draws it."""
    from jdaso._compare import table

    try:
        predictions = predict_all(args)
    except ValueError as error:
        raise SystemExit(f"jdaso predict: {error}") from error
    rows: list[tuple[str, ...]] = [("nodes", *DRAWN)]
    for place, nodes in enumerate(node_counts(args.max_nodes)):
        cells = (predictions[name][place] for name in DRAWN)
        rows.append((str(nodes), *(f"{p.step_time:.4g} s {p.efficiency:4.0%}" for p in cells)))
    last = predictions["dasgd"][-1]
    print(table(rows))
    notes = NOTES.format(
        period=last.period,
        delay=last.delay,
        daso=predictions["daso"][-1].delay,
        diloco=predictions["diloco"][-1].period,
        share=args.blocking_share,
        nodes=args.max_nodes,
        wire=args.wire or "float32, of allreduce_gradients bfloat16",
        seconds=last.exchange_time,
        steps=last.exchange_time / predictions["dasgd"][0].step_time,
    )
    print(f"\n{notes}")
    if args.overhead == args.slowdown == 0:
        print(OF_NOTHING)
    if args.pattern == "direct":
        print(OF_DIRECT)
    try:
        out = draw(predictions, node_counts(args.max_nodes), args.out or Path("predict.png"))
        print(f"\npicture: {out}")
    except ImportError:
        lacking = "no picture without matplotlib: pip install matplotlib"
        if args.out:
            raise SystemExit(f"jdaso predict: {lacking}") from None
        print(f"\n{lacking}")
    except (OSError, ValueError) as error:  # ValueError: a suffix that matplotlib does not know
        raise SystemExit(f"jdaso predict: {error}") from error


def node_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the largest number of nodes.

    >>> node_counts(12)
    [1, 2, 4, 8, 12]
    """
    return [2**k for k in range((most - 1).bit_length())] + [most]


def predict_all(args: argparse.Namespace) -> dict[str, list[Prediction]]:
    """Predictions of every algorithm that is drawn, for all numbers of nodes."""
    network = Network(
        args.latency, args.bandwidth * 1e9 / 8, local_bandwidth=args.local_bandwidth * 1e9 / 8
    )
    if math.isfinite(args.local_bandwidth) != (args.gpus_per_node > 1):
        raise ValueError(
            "--gpus-per-node (above 1) and --local-bandwidth belong together; without them the "
            "step time has all that happens within a node."
        )

    def of(name: str, nodes: int, **schedule: Any) -> Prediction:
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
            **schedule,
        )

    most = of("dasgd", args.max_nodes, period=args.period, delay=args.delay)
    schedules: dict[str, dict[str, Any]] = {name: {"period": most.period} for name in DRAWN}
    schedules["allreduce_gradients"] = {}
    schedules["dasgd"]["delay"] = most.delay
    schedules["daso"] |= {"delay": args.delay, "blocking_share": args.blocking_share}
    schedules["diloco"]["period"] = max(DILOCO_PERIOD, most.period)
    counts = node_counts(args.max_nodes)
    return {name: [of(name, n, **schedules[name]) for n in counts] for name in DRAWN}


def draw(predictions: dict[str, list[Prediction]], counts: list[int], out: Path) -> Path:
    """What a step's time goes into for each algorithm, and the speed-up of all, as a picture."""
    from matplotlib.figure import Figure

    # Not pyplot: it would look for a display, or change the caller's backend.
    figure = Figure(figsize=(15, 7.5), layout="constrained")
    panels = figure.subplots(2, 4).flatten()
    places = range(len(counts))
    highest = max(p.step_time for found in predictions.values() for p in found)
    for panel, (name, found) in zip(panels, predictions.items(), strict=False):
        hidden = [p.hidden for p in found]
        waiting = [p.waiting for p in found]
        rest = [p.step_time - p.waiting for p in found]
        panel.bar(places, rest, color="tab:blue", label="everything else")
        panel.bar(places, hidden, color="none", hatch="////", label="an exchange in flight, hidden")
        panel.bar(places, waiting, bottom=rest, color="tab:red", label="waiting for other nodes")
        title = f"{name}, period {found[-1].period}, delay {found[-1].delay}"
        panel.set(title=title, xlabel="nodes", ylabel="step, s", ylim=(0, 1.05 * highest))
        panel.set_xticks(places[::2], [str(n) for n in counts[::2]], rotation=45)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    speedup, efficiency = panels[-2:]
    for panel in (speedup, efficiency):
        panel.set_xscale("log", base=2)
    speedup.set_yscale("log", base=2)
    speedup.plot(counts, counts, c="k", ls=":", label="linear")
    for place, (name, found) in enumerate(predictions.items()):
        style: dict[str, Any] = {"marker": ".", "ls": ("-", "--")[place % 2], "label": name}
        speedup.plot(counts, [p.speedup for p in found], **style)
        efficiency.plot(counts, [p.efficiency for p in found], **style)
    speedup.set(title="weak scaling", xlabel="nodes", ylabel="speed-up")
    efficiency.set(title="weak scaling", xlabel="nodes", ylabel="efficiency", ylim=(0, 1.05))
    speedup.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150, format=out.suffix[1:] or "png")
    return out
