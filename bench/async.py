"""Repeats Figure 2 of the EASGD paper in small: the loss over time of workers around a centre.

    python bench/async.py [--seconds 5] [--runs runs/async] [--limit 170]

Trains with EASGD, EAMSGD and DOWNPOUR on digits, at period 1, 4, 16 and 64. There are 4 workers,
each an MPI process. For each method and period the table shows the learning rate with the lowest
last training loss of the centre. (The paper selects by test error.) Node 0 copies the centre now
and then, and the losses of the copies are computed after the run. Runs whose results are in the
folder already are skipped, so the script can be called again until all runs are done. "Rise" is
the largest ratio of a loss to an earlier one.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from machine import machine

import jdaso

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import study

WORKERS, BATCH_SIZE = 4, 32
PERIODS = (1, 4, 16, 64)
MOMENTUM = 0.9
RATES = {
    "easgd": (0.03, 0.1, 0.3, 1.0),
    "eamsgd": (0.003, 0.01, 0.03, 0.1, 0.3),
    "downpour": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3),
}
OPTIMIZERS = {
    "easgd": lambda center, period, rate: jdaso.chain(
        optax.sgd(rate), jdaso.center.async_easgd(center, period)
    ),
    "eamsgd": lambda center, period, rate: jdaso.center.async_eamsgd(
        center, period, rate, MOMENTUM
    ),
    "downpour": lambda center, period, rate: jdaso.chain(
        optax.sgd(rate), jdaso.center.downpour(center, period)
    ),
}
COPIES = 20  # copies of the centre in a run


def work(method: str, period: int, rate: float, seconds: float) -> None:
    """Trains as one worker of a run. Node 0 prints the results as JSON."""
    topology = jdaso.discover_topology()
    center = jdaso.center.mpi_center(topology)
    tx = OPTIMIZERS[method](center, period, rate)
    data, model = study.digits(), study.SmallCNN()

    def loss_fn(params, images, labels):
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, images, labels):
        grads = jax.grad(loss_fn)(params, images, labels)
        return jdaso.apply_gradients(tx, grads, state, params)

    # Each worker draws from all images, as in the paper.
    rng = np.random.default_rng(topology.rank)

    def batch():
        indices = rng.integers(len(data.labels), size=BATCH_SIZE)
        return data.images[indices], data.labels[indices]

    params = model.init(jax.random.key(0), jnp.asarray(data.images[:1]))
    params = center.join(params)
    state = tx.init(params)
    step = step.lower(params, state, *batch()).compile()
    topology.comm.barrier()
    start, steps, copies = time.monotonic(), 0, []
    while (now := time.monotonic() - start) < seconds:
        if topology.rank == 0 and now >= len(copies) * seconds / COPIES:
            copies.append((now, center.read(params).center))
        try:
            params, state = jax.block_until_ready(step(params, state, *batch()))
        except jax.errors.JaxRuntimeError as error:
            if "the centre would overflow" not in str(error):
                raise
            break  # the centre has diverged and accepts no more messages
        steps += 1
    copies.append((now, center.read(params).center))
    if topology.rank == 0:
        whole = jax.jit(loss_fn)
        losses = [float(whole(c, data.images, data.labels)) for _, c in copies]
        accuracy = study.accuracy(model, copies[-1][1], data.test_images, data.test_labels)
        result = {"times": [t for t, _ in copies], "losses": losses, "steps": steps}
        print(json.dumps({**result, "accuracy": accuracy, **center.report()}), flush=True)


def launch(method: str, period: int, rate: float, seconds: float) -> dict:
    """Runs a training in a job of its own, and returns its results."""
    launcher = shutil.which("mpiexec")
    if launcher is None:
        raise SystemExit("mpiexec is not on PATH: pip install mpich")
    command = [launcher, "-n", str(WORKERS), sys.executable, __file__, "--work", method]
    command += [str(period), str(rate), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def best(found: list[dict]) -> dict:
    """The run with the lowest last training loss. NaN counts as the highest loss."""
    return min(found, key=_last)


def _last(run: dict) -> float:
    return float(np.nan_to_num(run["losses"][-1], nan=np.inf))


def show(runs: dict[tuple[str, int], list[dict]], out: Path) -> None:
    """Prints a table, and draws the losses over time for each period."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    print(
        "| | period | learning rate | loss, half time | last | largest rise | test error "
        "| steps of a worker | last loss at each learning rate |\n" + 9 * "|---" + "|"
    )
    figure, axes = plt.subplots(1, len(PERIODS), sharey=True, figsize=(14, 4), layout="constrained")
    for (method, period), found in runs.items():
        run = best(found)
        losses = np.array(run["losses"])
        half = losses[len(losses) // 2]
        rise = (losses / np.minimum.accumulate(losses)).max()
        rates = ", ".join(f"{one['rate']:g}: {one['losses'][-1]:.3g}" for one in found)
        print(
            f"| {method} | {period} | {run['rate']} | {half:.4f} | {losses[-1]:.5f} "
            f"| {rise:.3g} | {1 - run['accuracy']:.4f} | {run['steps']} "
            f"| {rates} |"
        )
        axis = axes[PERIODS.index(period)]
        axis.semilogy(run["times"], losses, label=method)
        axis.set(title=f"period {period}", xlabel="seconds")
    for period in PERIODS:
        order = sorted(RATES, key=lambda method: _last(best(runs[method, period])))
        stable = [run["rate"] for run in runs["downpour", period] if _last(run) < run["losses"][0]]
        print(
            f"\nperiod {period}: {' < '.join(order)}; downpour learns at learning rates up to "
            f"{max(stable, default=0)}",
            end="",
        )
    axes[0].set(ylabel="training loss of the centre")
    axes[-1].legend()
    figure.savefig(out, dpi=120)
    print(f"\n\n{out}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="training time of each run")
    parser.add_argument("--runs", type=Path, default=Path("runs/async"), help="folder of results")
    parser.add_argument(
        "--limit", type=float, default=np.inf, help="seconds after which no run is started"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"), help="plot")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        method, period, rate, seconds = args.work
        return work(method, int(period), float(rate), float(seconds))
    start = time.monotonic()
    args.runs.mkdir(parents=True, exist_ok=True)
    print(machine())
    runs: dict[tuple[str, int], list[dict]] = {}
    for method, rates in RATES.items():
        for period in PERIODS:
            for rate in rates:
                path = args.runs / f"{method}-{period}-{rate}-{args.seconds:g}.json"
                if not path.exists():
                    if time.monotonic() - start > args.limit:
                        raise SystemExit("the time limit has passed; call the script again")
                    path.write_text(json.dumps(launch(method, period, rate, args.seconds)))
                run = {**json.loads(path.read_text()), "rate": rate}
                runs.setdefault((method, period), []).append(run)
    print(f"{WORKERS} workers, batch {BATCH_SIZE}, {args.seconds:g} s, momentum {MOMENTUM}\n")
    show(runs, args.out)


if __name__ == "__main__":
    main()
