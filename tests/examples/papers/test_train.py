"""A ResNet on digits, two processes of two devices each, and short runs of other algorithms."""

import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import auto_period
import pytest
from config import AUTO, Config
from launch import BESIDE_PYTHON, CHILDREN, run

import jdaso

ROOT = Path(__file__).parents[3]
SMALL = CHILDREN / "training.py"  # the same loop with a network that compiles at once


def train(out, *options, timeout, launched=True, script=ROOT / "examples" / "papers" / "train.py"):
    path = os.pathsep.join([BESIDE_PYTHON, os.environ.get("PATH", "")])
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        pytest.skip("no mpiexec on PATH: pip install mpich")
    command = [sys.executable, str(script)]
    if launched:
        command = [launcher, "-n", "2", *command, "--devices", "2"]
    command += ["--out", str(out), *options]
    ended = run(command, {**os.environ, "PATH": path}, timeout)
    assert ended.returncode == 0, ended.output
    accuracy = float(re.search(r"test accuracy ([\d.]+)", ended.output).group(1))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert (out / "report.png").stat().st_size > 1000
    return accuracy, lines, ended.output


@pytest.mark.slow
def test_daso_learns_digits(tmp_path):
    accuracy, lines, _ = train(tmp_path, timeout=900)
    assert accuracy >= 0.96
    assert lines[-1]["test_accuracy"] == pytest.approx(accuracy, abs=1e-4)
    assert [line["phase"] for line in lines[::8]] == ["warm-up", "cycling", "cycling"]
    assert {line["period"] for line in lines if line["phase"] == "cool-down"} == {1}


SHORT = ("--epochs", "2", "--warmup-epochs", "1")


@pytest.mark.parametrize(
    ("sync", "exchanges"),
    [
        pytest.param("allreduce_gradients", 44, marks=pytest.mark.slow),
        pytest.param("eamsgd", 10, marks=pytest.mark.slow),
        ("diloco --fragments 2", 22),
    ],
)
def test_other_algorithms_run(tmp_path, sync, exchanges):
    """Two epochs of 22 steps. EASGD exchanges before a step, so not after the last one."""
    _, lines, output = train(tmp_path, "--sync", *sync.split(), *SHORT, timeout=300, script=SMALL)
    assert lines[-1]["exchanges"] == exchanges
    few = "11 rounds of 4 steps. The first 10 are plain averaging, so the outer optimizer"
    assert output.count(f"{few} takes 1 steps") == ("diloco" in sync)  # one process prints it
    assert lines[-1]["loss"] < 2.3  # below ln 10, the loss of guessing


def test_period_auto_measures_the_first_steps(tmp_path):
    options = ("--period", "auto", *SHORT, "--epochs", "3", "--cooldown-epochs", "1")
    _, lines, _ = train(tmp_path, *options, timeout=300, script=SMALL)
    chosen = json.loads((tmp_path / "config.json").read_text())
    assert 1 <= chosen["delay"] < chosen["period"]
    assert chosen["wire"] == "bfloat16"
    assert [line["phase"] for line in lines] == ["warm-up", "cycling", "cool-down"]
    assert (lines[1]["period"], lines[1]["delay"]) == (chosen["period"], chosen["delay"])
    # The page for those who write metrics of their own has all keys.
    page = (ROOT / "docs" / "guides" / "watching.md").read_text()
    documented = set(re.findall(r"`(\w+)`", page))
    assert {key for key in lines[0] if not key.startswith("test_")} <= documented
    # A run that is resumed keeps them.
    again = Config(period=AUTO, resume=True, out=str(tmp_path))
    kept = auto_period.before(again, jdaso.discover_topology())
    assert (kept.period, kept.delay, kept.wire) == (chosen["period"], chosen["delay"], "bfloat16")
    first = dataclasses.replace(again, out=str(tmp_path / "other"))
    assert auto_period.before(first, jdaso.discover_topology()) == first


def test_the_script_starts_processes_that_share_one_model(tmp_path):
    """Two processes take two epochs of 44 steps. The second epoch begins with PASSM."""
    options = ("--sync", "passm_plus", "--processes", "2", "--switches", "1", *SHORT)
    _, lines, _ = train(tmp_path, *options, timeout=300, launched=False, script=SMALL)
    assert [line["step"] for line in lines] == [44, 88]
    assert [line["nodes"] for line in lines] == [2, 2]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["drift"] == 0
