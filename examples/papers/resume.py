"""Resumes a training that was stopped or killed from its last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import config as configuration
import numpy as np
from config import Config
from setup import Setup
from steps import TrainState

from jdaso.checkpoint import Checkpoints, at_step


def check_folder(out: Path, config: Config) -> None:
    """Raises ValueError if the folder belongs to another run."""
    saved = out / "config.json"
    if saved.exists() and not config.resume:
        raise ValueError(
            f"out: {out} already has a run; continue it with --resume, or choose another --out."
        )
    if saved.exists() and (changed := configuration.differences(config, saved)):
        raise ValueError(
            f"resume: the run in {out} has other keys: {', '.join(changed)}. Use the keys of "
            f"{saved}, or choose another --out."
        )


class Position(NamedTuple):
    """The progress of a training.

    Attributes:
        state: The state that training steps update.
        decay: The state of the learning rate.
        totals: float64[4], the totals so far in the order of ``loop.TOTALS``.
    """

    state: TrainState
    decay: Any
    totals: np.ndarray


def to_save(setup: Setup, position: Position) -> dict[str, Any]:
    """The contents of a checkpoint.

    The sizes are saved because the steps of an epoch depend on the number of processes.
    """
    return {
        **position._asdict(),
        "size": setup.task.dataset.train.size,
        "fingerprint": setup.task.dataset.fingerprint,
        "epoch_steps": setup.epoch_steps,
        "items_per_step": setup.items_per_step,
    }


def resume(setup: Setup, checkpoints: Checkpoints, begin: Position) -> tuple[Position, int]:
    """Returns position and step of the last checkpoint, or ``begin`` and 0 if there is none."""
    restored = checkpoints.restore(to_save(setup, begin))
    if restored is None:
        if setup.topology.rank == 0:
            print("there is no checkpoint to resume, so the run begins at step 0", flush=True)
        return begin, 0
    saved, nodes = restored.state, restored.num_nodes
    dataset, items = setup.task.dataset, "sequences" if setup.task.tokens else "images"
    if saved["size"] != dataset.train.size or saved["fingerprint"] != dataset.fingerprint:
        raise ValueError(
            f"data: the run to resume has {saved['size']} {items} for training, now there are "
            f"{dataset.train.size} (fingerprints {saved['fingerprint']} and "
            f"{dataset.fingerprint}), so all epochs would differ; give the same data."
        )
    state, step = saved["state"], restored.step
    same = saved["items_per_step"] == setup.items_per_step
    if not same:
        epoch, within = divmod(step, saved["epoch_steps"])
        seen = within * saved["items_per_step"] // setup.items_per_step
        step = epoch * setup.epoch_steps + min(seen, setup.epoch_steps - 1)
        state = at_step(state, step)
    if setup.topology.rank == 0:
        how = "bit for bit" if same else "with another number of devices"
        if nodes != setup.topology.num_nodes:
            how = f"from the mean over the {nodes} nodes that saved it"
        end = "; no steps are left" if step == setup.total else ""
        print(f"resumed at step {step} of {setup.total}, {how}{end}", flush=True)
    return Position(state, saved["decay"], saved["totals"]), step
