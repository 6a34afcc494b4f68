"""Compares jdaso with PyTorch's distributed training on the same network, batch and links.

    python bench/peers/compare.py --torch /path/to/torch/bin/python --rate 200mbit --delay 1ms
    python bench/peers/compare.py --torch ... --train /data/cifar10 --target-loss 1.2

Creates a cluster of the network lab (root, Linux) with one core per node, and runs both peers on
it, one after the other. torch_peers.py describes how to create torch's environment. A step with
communication is compared with a step of the same library without it ("alone"). For jdaso both are
measured in pairs. With ``--train`` the time until the target loss is compared. Writes all lines of
JSON to ``--out``, with the table and a plot beside it.

Other options are passed to both peers: --network, --batch, --rounds, --learning-rate, --seed,
--train, --target-loss, --epochs, --log-every. The --help of a peer describes them and its variants.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "lab")]

import lab  # noqa: E402
from machine import header, machine, row  # noqa: E402

# The settings of the allocator for torch. jdaso_peer.py uses machine.keep_memory.
KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
}


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(cluster: lab.Cluster, options: argparse.Namespace, rest: list[str]) -> list[dict]:
    """Runs both peers, and returns the lines of JSON that they print."""
    jdaso = [sys.executable, str(HERE / "jdaso_peer.py"), *rest]
    for option, value in (("--period", options.period), ("--delay", options.merge_delay)):
        jdaso += [option, str(value)] if value else []
    chosen = ["--variants", *options.jdaso] if options.jdaso else []
    limit = {"pin": True, "timeout": options.timeout}
    done = [cluster.run([*jdaso, *chosen], **limit)]
    if options.torch:
        torch = [options.torch, str(HERE / "torch_peers.py"), *rest]
        chosen = ["--variants", *options.peers] if options.peers else []
        done.append(cluster.each([*torch, *chosen], env=KEEP_MEMORY, **limit)[0])
    for ended in done:
        if ended.returncode != 0:
            raise SystemExit(f"a peer failed:\n{ended.stdout}{ended.stderr}")
    return [line for ended in done for line in lines_of(ended.stdout)]


def step_table(found: list[dict]) -> list[list[str]]:
    """The rows of the table of step times."""
    alone = {
        line["peer"]: line["seconds_per_step"]["median"]
        for line in found
        if line["variant"] == "none"
    }
    head = ["", "s/step, median", "range", "alone", "steps without a network", "images/s"]
    rows = [[*head, "MB/step"]]
    for line in found:
        seconds = line["seconds_per_step"]
        base = line.get("seconds_per_step_alone", {}).get("median") or alone.get(line["peer"])
        ratio = line.get("ratio", {}).get("median") or (base and seconds["median"] / base)
        rows.append(
            [
                f"{line['peer']} {line['variant']}",
                f"{seconds['median']:.3f}",
                f"{seconds['min']:.3f}..{seconds['max']:.3f}",
                f"{base:.3f}" if base else "-",
                f"{ratio:.3f}" if ratio else "-",
                f"{line['images_per_second']:.0f}",
                f"{line['bytes_sent_per_step'] / 1e6:.2f}",
            ]
        )
    return rows


def training_table(found: list[dict]) -> list[list[str]]:
    """The rows of the table of trainings."""
    rows = [["", "seconds to the loss", "steps", "last loss", "MB/step"]]
    for line in found:
        if "reached" in line:
            rows.append(
                [
                    f"{line['peer']} {line['variant']}",
                    f"{line['seconds']:.1f}" if line["reached"] else "not reached",
                    str(line["steps"]),
                    f"{line['loss']:.4f}",
                    f"{line['bytes_sent_per_step'] / 1e6:.2f}",
                ]
            )
    return rows


def draw(found: list[dict], title: str, out: Path) -> None:
    """Draws step times as bars, or losses over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    curves: list[dict] = []
    names = []
    for line in found:
        if "peer" not in line:
            curves.append(line)
        elif "reached" in line:
            mine, curves = curves, []
            style = "-" if line["peer"] == "jdaso" else "--"
            name = f"{line['peer']} {line['variant']}"
            points = [(point["seconds"], point["loss"]) for point in mine]
            axes.plot(*zip(*points, strict=True), style, label=name)
            axes.set(xlabel="seconds", ylabel="training loss")
        else:
            names.append(f"{line['peer']} {line['variant']}")
            color = "tab:blue" if line["peer"] == "jdaso" else "tab:orange"
            axes.barh(names[-1], line["seconds_per_step"]["median"], color=color)
            axes.set(xlabel="seconds of a step")
    if names:
        axes.invert_yaxis()
    else:
        axes.legend()
    axes.set_title(title, fontsize="small")
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # otherwise options of the peers may be taken for these
    )
    add = parser.add_argument
    add("--torch", help="Python of torch's environment; default: run only jdaso")
    add("--nodes", type=int, default=2, help="nodes of the lab")
    add("--rate", default="200mbit", help="of a link")
    add("--delay", default="1ms", help="of a link, one way")
    add("--period", type=int, help="of jdaso, with --merge-delay; default: the recommended one")
    add("--merge-delay", type=int, help="steps until an exchange of jdaso is merged")
    add("--jdaso", nargs="+", metavar="VARIANT", help="variants of jdaso; default: all")
    add("--peers", nargs="+", metavar="VARIANT", help="variants of torch; default: all")
    add("--timeout", type=float, default=1800, help="seconds for each library")
    add("--out", type=Path, default=Path("runs/peers"), help="results, without suffix")
    options, rest = parser.parse_known_args()
    rest = [str(Path(word).resolve()) if Path(word).is_dir() else word for word in rest]
    try:
        with lab.up(options.nodes, options.rate, options.delay) as cluster:
            found = run(cluster, options, rest)
    except lab.Missing as error:
        print(f"skipped: {error}")
        sys.exit(77)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    # The name may contain a dot.
    lines, plot = (Path(f"{options.out}.{suffix}") for suffix in ("jsonl", "png"))
    lines.write_text("".join(f"{json.dumps(x)}\n" for x in found))
    ours = next(line for line in found if line.get("peer") == "jdaso")
    title = (
        f"{options.nodes} nodes, one core each, {options.rate}, {options.delay}; "
        f"{ours['network']}, batch {ours['batch']}; jdaso: period {ours['period']}, "
        f"delay {ours['delay']}"
    )
    print(f"{machine()}\n{title}")
    training = any("reached" in line for line in found)
    head, *rows = training_table(found) if training else step_table(found)
    print(header(*head))
    for cells in rows:
        print(row(*cells))
    print(f"\nplot: {plot}")
    draw(found, title, plot)


if __name__ == "__main__":
    main()
