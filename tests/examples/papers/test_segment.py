"""The segmentation of streets with the training loop, two processes of two devices each."""

import json
import re
from pathlib import Path

import pytest
from launch import mpiexec

EXAMPLE = Path(__file__).parents[3] / "examples" / "papers" / "segment.py"
OPTIONS = ("--devices", 2, "--epochs", 4, "--warmup-epochs", 1, "--cooldown-epochs", 1)
IMAGES = ("--num-train", 128, "--num-test", 32, "--batch-size", 4)


@pytest.mark.slow
def test_streets_are_learnt(tmp_path):
    ended = mpiexec(2, EXAMPLE, *OPTIONS, *IMAGES, "--out", tmp_path, timeout=600)
    assert ended.returncode == 0, ended.output
    found = float(re.search(r"test iou ([\d.]+), test pixel accuracy", ended.output).group(1))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [8, 16, 24, 32]
    assert lines[-1]["loss"] < lines[0]["loss"]
    # Predicting one class for all pixels is right for less than half of them.
    assert found > 0.2 > 2 * 0.5 / 7
