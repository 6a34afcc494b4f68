"""Prints what XLA makes of training steps for CPU devices and for an H100, which need not exist.

    python bench/compiled.py [--platforms cpu cuda] [--resnet]

For an H100 it requires the wheels that ``make test-accelerators`` installs:
``PYTHONPATH=.venv/accelerators JAX_PLATFORMS=cpu python bench/compiled.py``. The parameters are 16
MB in 40 leaves. "temporary" is the memory for temporary arrays, in sizes of the parameters.
"waits" are the places at which the host waits for the device where nothing is due, and "copies" is
how many arrays a step then copies. ``--resnet`` compiles ResNet-50, which takes minutes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "support"), str(HERE.parent / "examples")]
jax.config.update("jax_num_cpu_devices", 4)

import optax  # noqa: E402
from deviceless import AVERAGINGS, Case, compile_case, compile_resnet, reason_to_skip  # noqa: E402
from pairs import header, row  # noqa: E402

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


def figures(case, platform, region_analysis=False):
    """Four cells of the table."""
    if "axis" in case.layout:
        case = case._replace(optimizer=ADAMW)
    found = compile_case(case._replace(platform=platform, region_analysis=region_analysis))
    gathers = found.count("all-gather")
    waits = found.waits if platform == "cuda" else "-"
    return f"{found.temporary:.2f}", str(found.copies_at_each_step), str(waits), str(gathers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platforms", nargs="+", choices=("cpu", "cuda"), default=["cpu", "cuda"])
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
    columns = ["step"]
    for platform in arguments.platforms:
        names = "temporary", "copies", *(("waits", "gathers") if platform == "cuda" else ())
        columns += [f"{'H100' if platform == 'cuda' else 'CPU'}: {name}" for name in names]
    if "cuda" in arguments.platforms:
        columns.append("region analysis: temporary")
    print(header(*columns))
    for name, case in ROWS.items():
        cells = []
        for platform in arguments.platforms:
            cells += figures(case, platform)[: 4 if platform == "cuda" else 2]
        if "cuda" in arguments.platforms:
            cells.append(figures(case, "cuda", True)[0])
        print(row(name, *cells), flush=True)


if __name__ == "__main__":
    main()
