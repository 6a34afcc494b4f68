"""The bandwidth that each method needs, beside the simulation of Streaming DiLoCo (its Table 4).

    python examples/papers/bandwidth.py [--utilization 0.95]

For models of 1 B, 10 B and 100 B parameters on two nodes, jdaso.perf gives the time of an exchange
and of a step. The table has the smallest bandwidth with which computing takes the given share of
the time. Assumptions are those of arXiv:2501.18512: the times of a step, H = 100, fragments of 3
layers, a delay of 1 step, and a grid of bandwidths of which each is 1.21 times the one before. All
reductions also overlap the backward pass, layer by layer. The paper does not say how many bits of a
parameter are sent: the bits here were fitted to its row of DiLoCo with 1 B parameters, and 4-bit
exchanges send a quarter of them.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np

from jdaso import perf

H, LAYERS_PER_FRAGMENT = 100, 3
BITS = 13.45  # per parameter, 84 % of bfloat16
GRID = np.logspace(-1, 3, 50)  # Gbit/s
BACKWARD = 2 / 3  # of a step
TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)


class Model(NamedTuple):
    """Parameters, layers, and seconds of a step."""

    parameters: float
    layers: int
    step: float


MODELS = {"1 B": Model(1e9, 24, 0.1), "10 B": Model(1e10, 48, 0.8), "100 B": Model(1e11, 108, 4.9)}

# Method -> model -> Gbit/s for each of TARGETS, from the paper's Table 4.
PAPER = {
    "data parallel": {
        "1 B": (86.8, 152.6, 184.2, 222.3, 569.0),
        "10 B": (104.8, 222.3, 222.3, 268.3, 471.5),
        "100 B": (184.2, 323.8, 390.7, 390.7, 471.5),
    },
    "DiLoCo": {
        "1 B": (1.4, 6.2, 13.3, 23.3, 86.8),
        "10 B": (1.7, 7.5, 16.0, 33.9, 104.8),
        "100 B": (3.0, 11.0, 23.3, 49.4, 184.2),
    },
    "Streaming DiLoCo": {
        "1 B": (1.4, 5.2, 9.1, 16.0, 28.1),
        "10 B": (1.7, 5.2, 9.1, 13.3, 19.3),
        "100 B": (2.4, 6.2, 9.1, 11.0, 19.3),
    },
    "the same, delay 1": {
        "1 B": (1.4, 4.3, 6.2, 9.1, 11.0),
        "10 B": (1.7, 3.6, 5.2, 6.2, 7.5),
        "100 B": (1.7, 3.6, 4.3, 5.2, 5.2),
    },
    "the same, delay 1, 4 bits": {
        "1 B": (0.4, 0.9, 1.7, 2.0, 3.0),
        "10 B": (0.4, 0.9, 1.4, 1.4, 1.7),
        "100 B": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}


def step_time(method: str, model: Model, gbit: float) -> float:
    """Mean seconds of a step with exchanges.

    An exchange of consecutive layers overlaps the backward pass of the layers below the topmost
    one. With fragments, it also overlaps the forward pass of the layers below the fragment's lowest
    one. The last layer's own reduction is never hidden without a delay.
    """
    bits = BITS / 4 if "4 bits" in method else BITS
    network = perf.Network(latency=0, bandwidth=gbit * 1e9 / 8)
    total = perf.allreduce_time(model.parameters * bits / 8, 2, network=network)
    delay = int("delay 1" in method)
    fragments, period = 1, 1 if method == "data parallel" else H
    if method not in ("data parallel", "DiLoCo"):
        fragments = model.layers // LAYERS_PER_FRAGMENT
    lowest = (fragments - 1) / 2  # on average over the strided fragments
    topmost = model.layers - 1 if fragments == 1 else model.layers - fragments + lowest
    hidden = (BACKWARD * topmost + (1 - BACKWARD) * lowest) / model.layers * model.step
    exchange = total / fragments
    shown = max(exchange - hidden, 0)
    if fragments == 1:
        shown = max(shown, exchange / model.layers)
    waiting = perf.mean_step_time(model.step, shown, period, delay) - model.step
    return model.step + fragments * waiting


def needed(method: str, model: Model, utilization: float) -> float:
    """The smallest bandwidth of the grid, in Gbit/s, that reaches the utilization."""
    enough = [x for x in GRID if model.step / step_time(method, model, x) >= utilization]
    return float(enough[0]) if enough else float("nan")


def is_close(ours: float, paper: float) -> bool:
    """Whether two bandwidths agree within 10 %."""
    return abs(ours / paper - 1) <= 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--utilization", type=float, nargs="+", choices=TARGETS, default=[0.95], metavar="SHARE"
    )
    options = parser.parse_args()
    close = []
    print("| utilization | model | method | paper, Gbit/s | jdaso.perf, Gbit/s | ratio |")
    print("|---|---|---|---|---|---|")
    for share in options.utilization:
        for name, model in MODELS.items():
            for method, figures in PAPER.items():
                paper = figures[name][TARGETS.index(share)]
                ours = needed(method, model, share)
                close.append(is_close(ours, paper))
                cells = [f"{share:.0%}", name, method, f"{paper:.1f}", f"{ours:.2f}"]
                print(f"| {' | '.join(cells)} | {ours / paper:.2f} |")
    print(f"\n{sum(close)} of {len(close)} figures agree within 10 %")


if __name__ == "__main__":
    main()
