"""Prints what XLA makes of training steps for CPU devices, an H100 and a TPU v5e.

    python bench/compiled.py [--platforms cpu cuda tpu] [--resnet]

The last two need not exist. They require the wheels that ``make test-accelerators`` installs:
``PYTHONPATH=.venv/accelerators JAX_PLATFORMS=cpu python bench/compiled.py``. The parameters are 16
MB in 40 leaves. "temporary" is the memory for temporary arrays, in sizes of the parameters.
"waits" are the places at which the host waits for the device where nothing is due, "copies" is
how many arrays a step then copies, and "gathers" counts all-gathers. On TPUs an exchange over MPI
copies by host callbacks. ``--resnet`` compiles ResNet-50, which takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE.parent / "examples" / "papers")]
jax.config.update("jax_num_cpu_devices", 4)

import optax  # noqa: E402
from deviceless import AVERAGINGS, Case, compile_case, compile_resnet, reason_to_skip  # noqa: E402
from machine import header, row  # noqa: E402

ADAMW = optax.adamw(1e-3)
ROWS = {
    **{name: Case(name) for name in AVERAGINGS},
    "daso, adamw": Case("daso", optimizer=ADAMW),
    "daso, host callbacks": Case("daso", native=False),
    "daso, 2 devices, replicated": Case("daso", devices=2),
    "daso, 2 devices, sharded": Case("daso", devices=2, layout="sharded"),
    "daso, 2 devices, shard_map": Case("daso", devices=2, layout="shard_map"),
    "axis_exchange, 4 devices, adamw: daso": Case("daso", devices=4, layout="axis"),
    "axis_exchange, 4 devices, adamw: diloco": Case("diloco", devices=4, layout="axis"),
}


NAMES = {"cpu": "CPU", "cuda": "H100", "tpu": "v5e"}
COLUMNS = {
    "cpu": ("temporary", "copies"),
    "cuda": ("temporary", "copies", "waits", "gathers"),
    "tpu": ("temporary", "gathers"),
}


def figures(case, platform, region_analysis=False):
    """The cells of a platform."""
    if "axis" in case.layout:
        case = case._replace(optimizer=ADAMW)
    found = compile_case(case._replace(platform=platform, region_analysis=region_analysis))
    cells = {
        "temporary": f"{found.temporary:.2f}",
        "copies": found.copies_at_each_step,
        "waits": found.waits,
        "gathers": found.count("all-gather"),
    }
    return [cells[name] for name in COLUMNS[platform]]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platforms", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--resnet", action="store_true", help="compile ResNet-50 as well")
    arguments = parser.parse_args()
    for platform in arguments.platforms:
        if reason := reason_to_skip(platform):
            parser.error(reason)
    print(f"jax {jax.__version__}\n")
    if arguments.resnet:
        print(header("ResNet-50", "copies", "temporary"))
        for name in ("none", "daso"):
            found = compile_resnet(name)
            print(row(name, f"{found.count('copy')}", f"{found.temporary:.2f}"), flush=True)
        return
    columns = [f"{NAMES[p]}: {name}" for p in arguments.platforms for name in COLUMNS[p]]
    more = ["region analysis: temporary"] if "cuda" in arguments.platforms else []
    print(header("step", *columns, *more))
    for name, case in ROWS.items():
        cells = [cell for platform in arguments.platforms for cell in figures(case, platform)]
        cells += [figures(case, "cuda", True)[0] for _ in more]
        print(row(name, *cells), flush=True)


if __name__ == "__main__":
    main()
