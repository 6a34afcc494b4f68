"""The training loop of all examples: training, evaluation, checkpoints, and resuming."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import auto_period
import config as configuration
import final_model
import jax
import numpy as np
import processes
import timeline
from config import Config
from report import report
from resume import Position, check_folder, resume, to_save
from setup import Setup, evaluate, mean_of, no_losses, set_up, training_batches
from steps import Task, TrainState
from watch import Watch

import jdaso
from jdaso.checkpoint import Checkpoints
from jdaso.core.command_line import local_path

FETCH_EVERY = 10  # steps; fetching the loss of every step would keep the devices waiting
#: Values that are counted from the start of the training, across all of its restarts.
TOTALS = ("seconds", "bytes_sent", "seconds_in_flight", "seconds_blocked")


def run(config: Config, create_task: Callable[[Config], Task]) -> int:
    """Trains to the end, or until a signal asks to stop. Returns the exit status of the program."""
    processes.start(config.processes)
    with jdaso.cluster.Preemption() as preemption:
        return train(config, create_task, preemption)


def train(
    config: Config, create_task: Callable[[Config], Task], preemption: jdaso.cluster.Preemption
) -> int:
    """Does the work of :func:`run`, with a handler for signals."""
    if config.devices:
        jdaso.cluster.use_virtual_devices(config.devices)
    per_node = config.processes_per_node or (1 if config.sync in configuration.SHARED else None)
    topology = jdaso.discover_topology(per_node, config.join_processes)
    first, out, task = topology.rank == 0, local_path(config.out, "out"), create_task(config)
    config = auto_period.before(config, topology)
    if first:
        check_folder(out, config)
    if config.period == configuration.AUTO:
        config = auto_period.choose(config, topology, lambda trial: set_up(trial, topology, task))
    setup, state = set_up(config, topology, task)
    if first:
        warn_of_few_rounds(config, setup.total)
    checkpoints = Checkpoints(out / "checkpoints", topology, setup.world, config.keep)
    checkpoints.claim()  # before another job's files are touched
    if first and not (out / "config.json").exists():
        # Only now, because a program that has failed before this point has not begun a run.
        out.mkdir(parents=True, exist_ok=True)
        configuration.save(config, out / "config.json")
    position, begin = Position(state, setup.rates.init(), np.zeros(len(TOTALS))), 0
    if config.resume:
        position, begin = resume(setup, checkpoints, position)
    epochs = begin // setup.epoch_steps
    tokens = setup.task.tokens
    count, unit = setup.items_per_step * (tokens or 1), "tok" if tokens else "img"
    watch = Watch(out, first, config.tensorboard, count, setup.total, begin, epochs, unit)
    state, done, line, stop = take_steps(setup, position, begin, checkpoints, watch, preemption)
    checkpoints.close()
    watch.close()
    if not stop:
        final_model.save(out, topology, *mean_model(setup, state))
    if first and stop:
        print(f"stopped by a signal and saved at step {done} of {setup.total}; --resume continues")
    elif first and line:
        report([out])
        print(summary(setup, line))
    return jdaso.cluster.EXIT_TRY_AGAIN if stop else 0


def warn_of_few_rounds(config: Config, steps: int) -> None:
    """Prints a line if a training of so many steps is too short for DiLoCo's outer optimizer."""
    if config.outer_warmup is None:
        return
    rounds = steps // config.period
    if rounds < 2 * config.outer_warmup:
        print(
            f"This run has {rounds} rounds of {config.period} steps. The first "
            f"{config.outer_warmup} are plain averaging, so the outer optimizer takes "
            f"{max(0, rounds - config.outer_warmup)} steps. Raise --epochs, or lower "
            "--period or --outer-warmup.",
            flush=True,
        )


def take_steps(
    setup: Setup,
    position: Position,
    begin: int,
    checkpoints: Checkpoints,
    watch: Watch,
    preemption: jdaso.cluster.Preemption,
) -> tuple[TrainState, int, dict[str, Any] | None, bool]:
    """Takes the steps from ``begin`` on, with evaluations and checkpoints.

    Returns:
        The state, the number of steps taken since the training began, the metrics of the last
        epoch that ended (None if no epoch ended), and whether a signal stopped the training.
    """
    state, decay, before = position
    total, epoch_steps, tokens = setup.total, setup.epoch_steps, setup.task.tokens
    count, speed = setup.items_per_step * (tokens or 1), "tokens" if tokens else "images"
    start = epoch_start = time.perf_counter()
    done = epoch_begin = begin
    line, stop = None, False

    def totals() -> np.ndarray:
        now = {"seconds": time.perf_counter() - start, **setup.world.report()}
        return before + [now[key] for key in TOTALS]

    for step, batch in enumerate(training_batches(setup, begin), begin):
        done = step + 1
        epoch_end = done % epoch_steps == 0
        if epoch_end:  # before the step, because its mean makes the nodes equal
            drift = float(mean_of(setup, jdaso.drift(setup.world, state.params)))
        rate = np.float32(setup.rates.at(decay, step / epoch_steps))
        state, loss, metrics = setup.train_step(state, rate, *batch)
        if step == epoch_begin or not epoch_end:
            plan = metrics  # not of the last step of an epoch, whose mean may block
        if step % FETCH_EVERY == 0 or epoch_end:
            watch.step(done, loss, metrics, rate)
        if epoch_end:
            state = jax.block_until_ready(setup.settled(state))
            seconds = time.perf_counter() - epoch_start
            state, scores = end_epoch(setup, state, last=done == total)
            decay = setup.rates.observe(decay, scores["loss"], step // epoch_steps)
            line = {
                "step": done,
                "epoch": done // epoch_steps,
                **dict(zip(TOTALS, totals().tolist(), strict=True)),
                **scores,
                "learning_rate": float(rate),
                "drift": drift,
                f"{speed}_per_second": (done - epoch_begin) * count / seconds,
                "nodes": setup.topology.num_nodes,
                **numbers(plan, metrics),
            }
            steps = range(epoch_begin, done - 1)  # without the last, whose mean may block
            if found := timeline.typical(setup.world.history(), steps, line["delay"]):
                line["exchange"] = found
            watch.epoch(line)
            epoch_start, epoch_begin = time.perf_counter(), done
        stop = preemption.requested(setup.world) and done < total
        if stop or done == total or done % (setup.config.save_every or epoch_steps) == 0:
            state = setup.settled(state)
            checkpoints.save(done, to_save(setup, Position(state, decay, totals())))
        if stop:
            break
    return state, done, line, stop


def end_epoch(setup: Setup, state: TrainState, last: bool) -> tuple[TrainState, dict[str, Any]]:
    """Evaluates after an epoch. Returns the state for the next epoch, the loss and the scores."""
    optimizer, loss = setup.optimizer, mean_of(setup, state.losses[0] / state.losses[1])
    if last and optimizer.averaging is not None:
        params, opt_state = jdaso.drain(optimizer.averaging, state.opt_state, state.params)
        state = state._replace(params=params, opt_state=opt_state)
    params, stats = mean_model(setup, state)
    scores = evaluate(setup, params, stats)
    return state._replace(losses=no_losses(setup)), {"loss": float(loss), **scores}


def mean_model(setup: Setup, state: TrainState) -> tuple[Any, Any]:
    """The parameters and batch statistics that are evaluated.

    Batch statistics differ between nodes, and parameters may differ as well. This is their mean.
    """
    own = (setup.optimizer.evaluated(state.params, state.opt_state), state.stats)
    return jdaso.consensus(setup.optimizer.exchange, own, state.opt_state)


def numbers(plan: jdaso.core.Metrics, metrics: jdaso.core.Metrics) -> dict[str, Any]:
    """The metrics of the averaging for the line of an epoch."""
    plan, metrics = jax.device_get((plan, metrics))
    return {
        "phase": jdaso.schedules.PHASES[plan.phase],
        "period": int(plan.period),
        "delay": int(plan.delay),
        "exchanges": int(metrics.exchanges),
        "skipped": int(metrics.skipped),
        "left_out": int(metrics.left_out),
    }


def summary(setup: Setup, line: dict[str, Any]) -> str:
    """The text that a training ends with."""
    scores = ", ".join(
        f"{key.replace('_', ' ')} {value:.4f}"
        for key, value in line.items()
        if key.startswith("test_") or key == "tokens_per_second"
    )
    return (
        f"{scores}  (sync={setup.config.sync}, {setup.topology.num_nodes} nodes x "
        f"{setup.topology.num_local_devices} devices, {line['seconds']:.1f} s, "
        f"{line['exchanges']} exchanges, {line['seconds_blocked']:.2f} s blocked, "
        f"{line['bytes_sent'] / 1e6:.3g} MB sent)"
    )
