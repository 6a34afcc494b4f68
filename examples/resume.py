"""Whose folder it is, and where a training goes on that was stopped or killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import config as configuration
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


def to_save(setup: Setup, state: TrainState, decay: Any) -> dict[str, Any]:
    """What a checkpoint holds; an epoch has other steps if there are more or fewer processes."""
    counts = {"epoch_steps": setup.epoch_steps, "images_per_step": setup.images_per_step}
    return {"state": state, "decay": decay, **counts}


def resume(
    setup: Setup, checkpoints: Checkpoints, state: TrainState, decay: Any
) -> tuple[TrainState, Any, int]:
    """State, decay and step of the last checkpoint; without one, those given and step 0."""
    restored = checkpoints.restore(to_save(setup, state, decay))
    if restored is None:
        return state, decay, 0
    saved, nodes = restored.state, restored.num_nodes
    state, decay, step = saved["state"], saved["decay"], restored.step
    same = saved["images_per_step"] == setup.images_per_step
    if not same:
        epoch, within = divmod(step, saved["epoch_steps"])
        seen = within * saved["images_per_step"] // setup.images_per_step
        step = epoch * setup.epoch_steps + min(seen, setup.epoch_steps - 1)
        state = at_step(state, step)
    if setup.topology.rank == 0:
        exact = same and nodes == setup.topology.num_nodes
        how = "bit for bit" if exact else f"from the mean over the {nodes} nodes that saved it"
        print(f"resumed at step {step} of {setup.total}, {how}", flush=True)
    return state, decay, step
