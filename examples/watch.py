"""What one sees of a training: a progress bar, metrics.jsonl, and TensorBoard's files."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import jdaso
from jdaso import report

BAR_SECONDS = 10.0  # between two lines of the bar where they stay, as in the log of a Slurm job


class Watch:
    """Shows and records a training; does nothing, and waits for nothing, unless active.

    Args:
        out: folder of metrics.jsonl and tensorboard/.
        active: whether this process is the one that records, rank 0.
        tensorboard: whether to write for TensorBoard, too.
        images_per_step: of all processes.
        total_steps: of the whole training.
        begin: the step that training goes on from, or 0.
        epochs: those that are done then; what an earlier process recorded of later ones is
            dropped.

    Raises:
        ImportError: for TensorBoard without tensorboardX.
    """

    def __init__(
        self,
        out: Path,
        active: bool,
        tensorboard: bool,
        images_per_step: int,
        total_steps: int,
        begin: int = 0,
        epochs: int = 0,
    ):
        self._active = active
        if not active:
            return
        out.mkdir(parents=True, exist_ok=True)
        begin_records(out / "metrics.jsonl", epochs)
        self._epoch, self._images_per_step = epochs, images_per_step
        self._records = (out / "metrics.jsonl").open("a", buffering=1)  # flushed line by line
        self._writer = _summary_writer(out / "tensorboard", begin) if tensorboard else None
        self._bar = tqdm(
            total=total_steps * images_per_step,
            initial=begin * images_per_step,
            unit="img",
            unit_scale=True,
            mininterval=0.1 if sys.stderr.isatty() else BAR_SECONDS,
        )

    def step(
        self,
        step: int,
        loss: jax.Array,
        metrics: jdaso.Metrics,
        learning_rate: jax.Array | float,
    ) -> None:
        """Shows a step; to be called every few steps, as it waits for the step's numbers.

        Args:
            step: optimizer steps taken.
            loss: this node's, a scalar.
            metrics: from :func:`jdaso.metrics`.
            learning_rate: of this step.
        """
        if not self._active:
            return
        loss, metrics, learning_rate = jax.device_get((loss, metrics, learning_rate))
        self._bar.set_postfix_str(
            f"epoch {self._epoch + 1}, loss {float(loss):.3f}, {jdaso.PHASES[metrics.phase]}, "
            f"period {metrics.period}, delay {metrics.delay}",
            refresh=False,
        )
        self._bar.update(step * self._images_per_step - self._bar.n)
        seen = {"loss": loss, "learning_rate": learning_rate, **metrics._asdict()}
        self._to_tensorboard("step", step, {key: float(value) for key, value in seen.items()})

    def epoch(self, line: dict[str, Any]) -> None:
        """Writes a line of metrics.jsonl, at the end of an epoch.

        Args:
            line: Python's numbers and strings, ``step``, ``epoch`` and ``seconds`` among them.
        """
        if not self._active:
            return
        self._epoch = line.get("epoch", self._epoch + 1)
        self._records.write(json.dumps(line) + "\n")
        self._to_tensorboard("epoch", line["step"], line)
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Ends the bar, and writes what is left."""
        if not self._active:
            return
        self._bar.close()
        self._records.close()
        if self._writer:
            self._writer.close()

    def _to_tensorboard(self, group: str, step: int, line: dict[str, Any]) -> None:
        if self._writer:
            for key, value in line.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"{group}/{key}", value, step)


def begin_records(path: Path, epochs: int) -> None:
    """Cuts off what follows the lines of the first epochs.

    A job that is killed meanwhile leaves the old file.
    """
    lines = report.read_lines(path) if epochs and path.exists() else []
    kept = [line for line in lines if line["epoch"] <= epochs]
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(line) + "\n" for line in kept))
    os.replace(new, path)


def _summary_writer(folder: Path, begin: int) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "TensorBoard's files need tensorboardX: pip install tensorboardX, or leave out "
            "--tensorboard."
        ) from error
    # TensorBoard hides what earlier processes wrote of this step and later ones.
    return SummaryWriter(str(folder), purge_step=begin + 1 if begin else 0)
