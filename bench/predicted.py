"""Compares predicted with measured step times, over nodes, links and algorithms.

    python bench/predicted.py [--nodes 2 4] [--rates 100mbit 200mbit 1gbit] [--delay 1ms]

For each number of nodes and each rate the script creates a cluster of the network lab (root,
Linux). There ``python -m jdaso tune`` measures the network. From this and the time of a step
without exchanges, jdaso.perf.predict predicts the step time of each algorithm, and
bench/peers/jdaso_peer.py measures it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "lab"), str(HERE / "peers")]

import lab  # noqa: E402
import workload  # noqa: E402
from machine import machine  # noqa: E402

from jdaso import perf  # noqa: E402

PERIOD, DELAY = 4, 3
WIRE = "float32"  # of all variants
# The variants of jdaso_peer.py, with algorithm and arguments of their predictions.
VARIANTS = {
    "synchronous": ("allreduce_gradients", {"wire": WIRE}),
    "local_sgd": ("local_sgd", {"period": PERIOD}),
    "dasgd": ("dasgd", {"period": PERIOD, "delay": DELAY}),
    "daso": ("daso", {"period": PERIOD, "delay": DELAY}),
}


def parameters(network: str) -> int:
    layers = workload.first_parameters(network)
    return sum(array.size for layer in layers for array in layer.values())


def run(cluster: lab.Cluster, command: list[str]) -> str:
    done = cluster.run([sys.executable, *command], pin=True, timeout=900)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def tuned(cluster: lab.Cluster, count: int) -> dict[str, Any]:
    """The arguments of ``perf.predict`` that tune measures and prints."""
    return measured_by_tune(run(cluster, ["-m", "jdaso", "tune", "--parameters", str(count)]))


def measured_by_tune(text: str) -> dict[str, Any]:
    """The arguments of ``perf.predict`` in the report of tune."""

    def numbers(pattern: str) -> list[float]:
        found = re.search(f"^{pattern}", text, re.MULTILINE)
        if found is None:
            raise SystemExit(f"tune did not print {pattern}:\n{text}")
        return [float(number) for number in found.groups()]

    (latency,) = numbers(r"latency +(\S+) s")
    (bandwidth,) = numbers(r"bandwidth +(\S+) Gbit/s")
    _, overhead, slowdown = numbers(rf"{WIRE} +(\S+) +(\S+) +(\S+)$")
    network = perf.Network(latency, bandwidth * 1e9 / 8)
    return {"network": network, "overhead": overhead, "slowdown": slowdown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "200mbit", "1gbit"])
    parser.add_argument("--delay", default="1ms", help="of a link, one way")
    parser.add_argument("--network", default="conv", choices=workload.NETWORKS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    count = parameters(options.network)
    peer = [str(HERE / "peers" / "jdaso_peer.py"), "--network", options.network]
    peer += ["--variants", *VARIANTS, "--period", str(PERIOD), "--delay", str(DELAY)]
    print(machine())
    print(f"{options.network}, {count} parameters; period {PERIOD}, delay {DELAY}; one core a node")
    print("| nodes | link | algorithm | alone, s | predicted, s | measured, s | ratio |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for nodes in options.nodes:
        for rate in options.rates:
            try:
                with lab.up(nodes, rate, options.delay) as cluster:
                    found = tuned(cluster, count)
                    text = run(cluster, [*peer, "--rounds", str(options.rounds)])
            except lab.Missing as error:
                print(f"skipped: {error}")
                sys.exit(77)
            for line in map(json.loads, text.splitlines()):
                alone = line["seconds_per_step_alone"]["median"]
                # The ratio comes from pairs, because the speed of a shared machine varies.
                measured = alone * line["ratio"]["median"]
                algorithm, arguments = VARIANTS[line["variant"]]
                predicted = perf.predict(
                    algorithm,
                    nodes,
                    num_parameters=count,
                    step_time=alone,
                    **found,
                    **arguments,
                ).step_time
                cells = [nodes, f"{rate}, {options.delay}", line["variant"]]
                cells += [f"{x:.3f}" for x in (alone, predicted, measured, predicted / measured)]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
