"""Whose folder it is, and where a training goes on that was stopped or killed."""

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
    """Raises ValueError if a folder belongs to another run."""
    saved = out / "config.json"
    if saved.exists() and not config.resume:
        raise ValueError(
            f"out: {out} holds a run already; --resume goes on with it, or choose another --out."
        )
    if saved.exists() and (changed := configuration.differences(config, saved)):
        raise ValueError(
            f"resume: {out} is a run with other keys: {', '.join(changed)}. Take those of {saved}, "
            "or choose another --out."
        )


class Position(NamedTuple):
    """Where a training is.

    Attributes:
        state: what steps change.
        decay: of the learning rate.
        totals: float64, seconds, bytes sent, seconds in flight and seconds blocked so far.
    """

    state: TrainState
    decay: Any
    totals: np.ndarray


def to_save(setup: Setup, position: Position) -> dict[str, Any]:
    """What a checkpoint holds; an epoch has other steps if there are more or fewer processes."""
    return {
        **position._asdict(),
        "num_images": setup.task.dataset.train.size,
        "epoch_steps": setup.epoch_steps,
        "images_per_step": setup.images_per_step,
    }


def resume(setup: Setup, checkpoints: Checkpoints, begin: Position) -> tuple[Position, int]:
    """Position and step of the last checkpoint; without one, the position given and step 0."""
    restored = checkpoints.restore(to_save(setup, begin))
    if restored is None:
        return begin, 0
    saved, nodes = restored.state, restored.num_nodes
    if saved["num_images"] != setup.task.dataset.train.size:
        raise ValueError(
            f"data: the run to resume has {saved['num_images']} images for training, now there are "
            f"{setup.task.dataset.train.size}, another order and other epochs. Give it the same."
        )
    state, step = saved["state"], restored.step
    same = saved["images_per_step"] == setup.images_per_step
    if not same:
        epoch, within = divmod(step, saved["epoch_steps"])
        seen = within * saved["images_per_step"] // setup.images_per_step
        step = epoch * setup.epoch_steps + min(seen, setup.epoch_steps - 1)
        state = at_step(state, step)
    if setup.topology.rank == 0:
        how = "bit for bit" if same else "with another number of devices"
        if nodes != setup.topology.num_nodes:
            how = f"from the mean over the {nodes} nodes that saved it"
        end = "; nothing is left to do" if step == setup.total else ""
        print(f"resumed at step {step} of {setup.total}, {how}{end}", flush=True)
    return Position(state, saved["decay"], saved["totals"]), step
