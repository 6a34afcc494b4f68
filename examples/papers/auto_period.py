"""Chooses period and delay from the first steps of the run, for ``--period auto``.

The first steps are taken twice: once to measure, with an exchange now and then, and once to train.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable

import config as configuration
import jax
import numpy as np
from config import AUTO, Config
from setup import Setup, mean_of, training_batches
from steps import TrainState

import jdaso
from jdaso import perf
from jdaso.core.command_line import local_path

WIRE = "bfloat16"  # if the configuration has none
STEPS, PERIOD, DELAY = 24, 8, 4  # of the measurement, which posts after the steps 7, 15 and 23
CHOSEN = ("period", "delay", "wire")


def before(config: Config, topology: jdaso.Topology) -> Config:
    """The configuration with what an earlier start of the run has chosen, if it is resumed."""
    saved = local_path(config.out, "out") / "config.json"
    found = None
    if topology.rank == 0 and config.period == AUTO and config.resume and saved.exists():
        found = {name: json.loads(saved.read_text())[name] for name in CHOSEN}
    found = topology.group.broadcast(found)
    return config if found is None else dataclasses.replace(config, **found)


def choose(
    config: Config,
    topology: jdaso.Topology,
    set_up: Callable[[Config], tuple[Setup, TrainState]],
) -> Config:
    """The configuration with the period and the delay for the shortest time to a loss.

    All nodes choose the same, from the means of what they measure.
    """
    trial = {"sync": "dasgd", "period": PERIOD, "delay": DELAY, "own_weight": 0.25, "fragments": 1}
    trial["wire"] = wire = config.wire or WIRE
    if topology.num_nodes == 1:
        best = {"period": 2, "delay": 1, "wire": wire}
        text = "1 node, which exchanges nothing"
    else:
        setup, state = set_up(dataclasses.replace(config, **trial))
        alone, costs = measure(setup, state)
        setup.world.close()
        rules = [(config.sync, "mean")]
        found = perf.recommend(alone, {wire: costs}, topology.num_nodes, rules)
        # The period must fit between warm-up and cool-down.
        epochs = config.epochs - config.warmup_epochs - (config.cooldown_epochs or 0)
        period = min(found[0].period, max(2, epochs * setup.epoch_steps))
        best = {"period": period, "delay": min(found[0].delay, period - 1), "wire": wire}
        text = (
            f"a step takes {alone:.3g} s, and an exchange in {wire} {costs.exchange_time:.3g} s. "
            f"Expected: {found[0].step_time:.3g} s, worth {found[0].progress:.2f} steps of "
            "synchronous training"
        )
    if topology.rank == 0:
        options = " ".join(f"{configuration.option(name)} {best[name]}" for name in CHOSEN)
        print(f"--period auto chose {options}: {text}", flush=True)
    return dataclasses.replace(config, **best)


def measure(setup: Setup, state: TrainState) -> tuple[float, perf.WireCosts]:
    """Seconds of a step without exchanges, and the costs of an exchange; means over the nodes."""
    if setup.total < STEPS:
        raise ValueError(f"--period auto needs at least {STEPS} steps, got {setup.total}.")
    rate = np.float32(setup.rates.at(setup.rates.init(), 0.0))
    seconds = np.zeros(STEPS)
    for step, batch in zip(range(STEPS), training_batches(setup, 0), strict=False):
        start = time.perf_counter()
        state, *_ = jax.block_until_ready(setup.train_step(state, rate, *batch))
        seconds[step] = time.perf_counter() - start
    record = setup.world.history()[-1]  # of the exchange that was posted after step 15
    exchange_time, waited = (end - start for start, end in (record.transfer, record.wait))
    alone = float(np.median(seconds[[4, 5, 6, 13, 14, 21, 22]]))
    post, merge = seconds[15] - alone, seconds[19] - alone - waited
    slower = float(np.median(seconds[16:19])) - alone
    found = [exchange_time, max(0.0, post) + max(0.0, merge), max(0.0, slower) / alone]
    alone, exchange_time, overhead, slower = mean_of(setup, np.array([alone, *found])).tolist()
    return alone, perf.WireCosts(exchange_time, overhead, slower * exchange_time)
