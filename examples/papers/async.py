"""Repeats Figure 2 of the EASGD paper in small: the loss of the center of asynchronous workers.

    python examples/papers/async.py [--steps 1000] [--runs runs/async] [--limit 500]

Trains on digits with the seven methods of the figure, at periods of 1, 4, 16 and 64 steps. There
are 4 workers, each an MPI process, and MSGD has one. MDOWNPOUR and MSGD have no period. As in the
paper, the momentum is 0.99, beta is 0.9, and the moving rate of MVADOWNPOUR is 0.001. For each
method and period the table shows the learning rate with the lowest last training loss of the
center. (The paper selects by test error.) ADOWNPOUR and MVADOWNPOUR are evaluated at the average of
their center.

Each worker takes the same number of steps at its own pace. Node 0 copies the center now and then
and, at the end, when all workers have finished. The losses of the copies are computed after the
run. Runs whose results are in the folder already are skipped, so the script can be called again
until all runs are done. "Rise" is the largest ratio of a loss to an earlier one.
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
import study

import jdaso

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from machine import header, machine, row

WORKERS, BATCH_SIZE = 4, 32
PERIODS = (1, 4, 16, 64)
MOMENTUM = 0.99
DOWNPOUR_RATES = (0.01, 0.03, 0.1, 0.3)
MOMENTUM_RATES = (0.001, 0.003, 0.01, 0.03)
# name -> (optimizer with learning rate 1, learning rates, periods, workers). All methods are linear
# in learning rate times gradient, so runs scale the gradients and share a compiled program.
METHODS = {
    "easgd": (
        lambda center, period: jdaso.chain(
            optax.sgd(1.0), jdaso.center.async_easgd(center, period)
        ),
        (0.03, 0.1, 0.3, 1.0),
        PERIODS,
        WORKERS,
    ),
    "eamsgd": (
        lambda center, period: jdaso.center.async_eamsgd(center, period, 1.0, MOMENTUM),
        MOMENTUM_RATES,
        PERIODS,
        WORKERS,
    ),
    "mdownpour": (
        lambda center, period: jdaso.center.mdownpour(center, 1.0, MOMENTUM),
        (0.0001, 0.0003, 0.001, 0.003),
        (1,),
        WORKERS,
    ),
    "msgd": (
        # One worker of DOWNPOUR that exchanges at every step is its optimizer alone.
        lambda center, period: jdaso.chain(
            optax.sgd(1.0, MOMENTUM, nesterov=True), jdaso.center.downpour(center, 1)
        ),
        MOMENTUM_RATES,
        (1,),
        1,
    ),
    **{
        method.__name__: (
            lambda center, period, method=method: jdaso.chain(
                optax.sgd(1.0), method(center, period)
            ),
            DOWNPOUR_RATES,
            PERIODS,
            WORKERS,
        )
        for method in (jdaso.center.downpour, jdaso.center.adownpour, jdaso.center.mvadownpour)
    },
}
COPIES = 20  # copies of the center in a run


def work(method: str, period: int, rates: list[float], steps: int) -> None:
    """Trains as one worker with one learning rate after the other.

    Node 0 prints a line of JSON for each. After a run that diverged, the job ends.
    """
    topology = jdaso.discover_topology()
    center = jdaso.center.mpi_center(topology)
    tx = METHODS[method][0](center, period)
    data, model = study.digits(), study.SmallCNN()

    def loss_fn(params, images, labels):
        logits = model.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, rate, images, labels):
        grads = jax.grad(loss_fn)(params, images, labels)
        grads = jax.tree.map(lambda g: rate * g, grads)
        return jdaso.apply_gradients(tx, grads, state, params)

    # Each worker draws from all images, as in the paper.
    rng = np.random.default_rng(topology.rank)

    def batch():
        indices = rng.integers(len(data.labels), size=BATCH_SIZE)
        return data.images[indices], data.labels[indices]

    def run(rate: float) -> tuple[list, bool]:
        """Steps and copies of what is evaluated, and whether the center has diverged."""
        params = center.join(initial)
        state, copies = tx.init(params), [(0, copy())]
        topology.group.barrier("the start of a run", 600.0)
        for number in range(steps):
            if topology.rank == 0 and number and number % max(1, steps // COPIES) == 0:
                copies.append((number, copy()))
            try:
                params, state = jax.block_until_ready(step(params, state, rate, *batch()))
            except jax.errors.JaxRuntimeError as error:
                if "the center would overflow" not in str(error):
                    raise
                break  # the center accepts no more messages
        topology.group.barrier("the end of a run", 600.0)
        if topology.rank == 0:
            copies.append((number + 1, copy()))  # when all workers have finished
        return copies, any(topology.comm.allgather(number + 1 < steps))

    def copy():
        state = center.read(initial)
        return state.center if state.average == () else state.average

    initial = model.init(jax.random.key(0), jnp.asarray(data.images[:1]))
    params = center.join(initial)
    step = step.lower(params, tx.init(params), 0.1, *batch()).compile()
    first = center.read(initial)
    whole = jax.jit(loss_fn)
    for rate in rates:
        topology.group.barrier("a new center", 600.0)
        if topology.rank == 0:
            center.write(first)
        topology.group.barrier("the new center", 600.0)
        copies, diverged = run(rate)
        if topology.rank == 0:
            losses = [float(whole(c, data.images, data.labels)) for _, c in copies]
            accuracy = study.accuracy(model, copies[-1][1], data.test_images, data.test_labels)
            result = {"steps": [t for t, _ in copies], "losses": losses, "accuracy": accuracy}
            print(json.dumps({"rate": rate, **result}), flush=True)
        if diverged:
            break


def launch(method: str, period: int, rates: list[float], steps: int) -> list[dict]:
    """Trains in a job with several learning rates, and returns the results that it has got."""
    launcher = shutil.which("mpiexec")
    if launcher is None:
        raise SystemExit("mpiexec is not on PATH: pip install mpich")
    command = [launcher, "-n", str(METHODS[method][3]), sys.executable, __file__, "--work"]
    command += [method, str(period), str(steps), *map(str, rates)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not results:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return results


def best(found: list[dict]) -> dict:
    """The run with the lowest last training loss. NaN counts as the highest loss."""
    return min(found, key=_last)


def _last(run: dict) -> float:
    return float(np.nan_to_num(run["losses"][-1], nan=np.inf))


def show(runs: dict[tuple[str, int], list[dict]], out: Path) -> None:
    """Prints a table, and draws the losses over the steps for each period."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    names = ("", "period", "learning rate", "loss, half time", "last", "largest rise")
    print(header(*names, "test error", "last loss at each learning rate"))
    figure, axes = plt.subplots(1, len(PERIODS), sharey=True, figsize=(14, 4), layout="constrained")
    colors = dict(zip(METHODS, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for (method, period), found in runs.items():
        run = best(found)
        losses = np.array(run["losses"])
        half = losses[len(losses) // 2]
        rise = (losses / np.minimum.accumulate(losses)).max()
        rates = ", ".join(f"{one['rate']:g}: {one['losses'][-1]:.3g}" for one in found)
        own = METHODS[method][2] != (1,)
        cells = f"{half:.4f}", f"{losses[-1]:.5f}", f"{rise:.3g}", f"{1 - run['accuracy']:.4f}"
        print(row(method, period if own else "-", run["rate"], *cells, rates))
        # What has no period is drawn in each part, for comparison.
        for axis in [axes[PERIODS.index(period)]] if own else axes:
            style = {"color": colors[method], "ls": "-" if own else "--"}
            axis.semilogy(run["steps"], losses, label=method, **style)
    for period, axis in zip(PERIODS, axes, strict=True):
        axis.set(title=f"period {period}", xlabel="steps of a worker", ylim=(1e-5, 10))
        methods = [m for m, entry in METHODS.items() if period in entry[2] or entry[2] == (1,)]
        last = {m: _last(best(runs[m, period if period in METHODS[m][2] else 1])) for m in methods}
        print(f"\nperiod {period}: {' < '.join(sorted(last, key=last.__getitem__))}", end="")
    axes[0].set(ylabel="training loss of the center")
    axes[0].legend()
    figure.savefig(out, dpi=120)
    print(f"\n\n{out}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="steps of each worker")
    parser.add_argument("--runs", type=Path, default=Path("runs/async"), help="folder of results")
    parser.add_argument(
        "--limit", type=float, default=np.inf, help="seconds after which no job is started"
    )
    parser.add_argument("--out", type=Path, default=Path("async.png"), help="plot")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        method, period, steps, *rates = args.work
        return work(method, int(period), [float(rate) for rate in rates], int(steps))
    start = time.monotonic()
    args.runs.mkdir(parents=True, exist_ok=True)
    print(machine())
    runs: dict[tuple[str, int], list[dict]] = {}
    for method, (_, rates, periods, _) in METHODS.items():
        for period in periods:
            path = {
                rate: args.runs / f"{method}-{period}-{rate}-{args.steps}.json" for rate in rates
            }
            while missing := [rate for rate in rates if not path[rate].exists()]:
                if time.monotonic() - start > args.limit:
                    raise SystemExit("the time limit has passed; call the script again")
                for result in launch(method, period, missing, args.steps):
                    path[result["rate"]].write_text(json.dumps(result))
            runs[method, period] = [json.loads(path[rate].read_text()) for rate in rates]
    print(f"{WORKERS} workers, batch {BATCH_SIZE}, {args.steps} steps, momentum {MOMENTUM}\n")
    show(runs, args.out)


if __name__ == "__main__":
    main()
