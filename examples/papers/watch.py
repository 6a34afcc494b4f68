"""Shows and records a training: a progress bar, metrics.jsonl, and files for TensorBoard."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import report
from tqdm import tqdm

import jdaso

BAR_SECONDS = 10.0  # between two updates of the bar in a log file, where each is a new line


class Watch:
    """Shows and records a training.

    A process that is not active returns from every method at once.

    Args:
        out: Folder of metrics.jsonl and tensorboard/.
        active: Whether this process records the training. Only rank 0 does.
        tensorboard: Whether to write files for TensorBoard.
        per_step: Images or tokens of all processes in one step.
        total_steps: Steps of the whole training.
        begin: The step from which training continues, or 0.
        epochs: Number of completed epochs at that step. Lines that an earlier process wrote about
            later epochs are dropped.
        unit: What the bar counts.

    Raises:
        ImportError: If ``tensorboard`` is set and tensorboardX is not installed.
    """

    def __init__(
        self,
        out: Path,
        active: bool,
        tensorboard: bool,
        per_step: int,
        total_steps: int,
        begin: int = 0,
        epochs: int = 0,
        unit: str = "img",
    ):
        self._active = active
        if not active:
            return
        out.mkdir(parents=True, exist_ok=True)
        begin_records(out / "metrics.jsonl", epochs)
        self._epoch, self._per_step = epochs, per_step
        self._records = (out / "metrics.jsonl").open("a", buffering=1)  # flushed line by line
        self._writer = _summary_writer(out / "tensorboard", begin) if tensorboard else None
        self._bar = tqdm(
            total=total_steps * per_step,
            initial=begin * per_step,
            unit=unit,
            unit_scale=True,
            mininterval=0.1 if sys.stderr.isatty() else BAR_SECONDS,
        )

    def step(
        self,
        step: int,
        loss: jax.Array,
        metrics: jdaso.core.Metrics,
        learning_rate: jax.Array | float,
    ) -> None:
        """Shows a step. Call it only every few steps, because it waits until the step has ended.

        Args:
            step: Number of optimizer steps taken.
            loss: The loss of this node, a scalar.
            metrics: The result of :func:`jdaso.metrics`.
            learning_rate: The learning rate of the step.
        """
        if not self._active:
            return
        loss, metrics, learning_rate = jax.device_get((loss, metrics, learning_rate))
        self._bar.set_postfix_str(
            f"epoch {self._epoch + 1}, loss {float(loss):.3f}, "
            f"{jdaso.schedules.PHASES[metrics.phase]}, "
            f"period {metrics.period}, delay {metrics.delay}",
            refresh=False,
        )
        self._bar.update(step * self._per_step - self._bar.n)
        values = {"loss": loss, "learning_rate": learning_rate, **metrics._asdict()}
        self._to_tensorboard("step", step, {key: float(value) for key, value in values.items()})

    def epoch(self, line: dict[str, Any]) -> None:
        """Writes the line of an epoch to metrics.jsonl.

        Args:
            line: Numbers and strings, with at least the keys ``step``, ``epoch`` and ``seconds``.
        """
        if not self._active:
            return
        self._epoch = line.get("epoch", self._epoch + 1)
        self._records.write(json.dumps(line) + "\n")
        self._to_tensorboard("epoch", line["step"], line)
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """Closes the bar and the files."""
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
    """Keeps only the lines of the first ``epochs`` epochs.

    The file is replaced atomically, so a job that is killed meanwhile leaves the old file.
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
            "--tensorboard needs tensorboardX: pip install tensorboardX, or leave the option out."
        ) from error
    # TensorBoard hides what earlier processes wrote about this step and later steps.
    return SummaryWriter(str(folder), purge_step=begin + 1 if begin else 0)
