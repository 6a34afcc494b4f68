"""The examples that read from top to bottom run on two processes, and show that they learn."""

import importlib.util
import json
import os
import re
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from launch import BESIDE_PYTHON, run
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


def output_of(script, *options, status=0, **env):
    """What an example prints when two processes run it."""
    path = os.pathsep.join([BESIDE_PYTHON, os.environ.get("PATH", "")])
    launcher = shutil.which("mpiexec", path=path)
    if launcher is None:
        pytest.skip("no mpiexec on PATH: pip install mpich")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PATH": path, **env}
    environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    command = [launcher, "-n", "2", sys.executable, str(EXAMPLES / script), *map(str, options)]
    ended = run(command, environment, timeout=600)
    assert ended.returncode == status, ended.output
    return ended.output


def test_minimal_learns_digits_from_both_shares():
    output = output_of("minimal.py")
    shares = re.findall(r"node (\d) of 2 has seen 704 images", output)
    accuracies = re.findall(r"Test accuracy of the mean: (.*)", output)
    assert sorted(shares) == ["0", "1"]
    assert accuracies[0] == accuracies[1]
    assert float(accuracies[0]) > 0.9


TINY = "--model resnet8 --data digits --devices 2 --batch-size 64 --delay 2 --learning-rate 0.02"
PHASES = "--epochs 3 --warmup-epochs 1 --cooldown-epochs 1"  # of 5 steps each


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_resnet_has_three_phases_and_continues_from_a_checkpoint_with_the_same_bits(tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    options = (*TINY.split(), *PHASES.split())
    output = output_of("resnet50.py", *options, "--out", out)
    assert re.search(r"cool-down .* synchronous training: a step waited \d", output)
    assert f"Picture: {out}/metrics.png" in output
    assert (out / "metrics.png").stat().st_size > 1000
    assert (out / "model").is_dir()
    assert [line["phase"] for line in lines(out)] == ["warm-up", "cycling", "cool-down"]
    assert [line["delay"] for line in lines(out)] == [0, 2, 0]
    assert lines(out)[-1]["exchanges"] == 5 + 2 + 5

    (first,) = (out / "checkpoints").glob("*_step_5")
    shutil.copytree(first, again / "checkpoints" / first.name)
    shutil.copy(out / "metrics.jsonl", again)
    output = output_of("resnet50.py", *options, "--out", again)
    assert "continues at step 5 of 15" in output
    for key in ("step", "loss", "test_accuracy", "phase", "exchanges"):
        assert [line[key] for line in lines(again)] == [line[key] for line in lines(out)]


def test_language_model_learns_and_continues_from_a_checkpoint_with_the_same_bits(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(
        "the network between the nodes is the bottleneck. " * 99
    )
    out, again = tmp_path / "out", tmp_path / "again"
    options = "--layers 2 --width 32 --context 16 --batch-size 8 --steps 24 --evaluate-every 12"
    options += f" --period 4 --delay 2 --outer-warmup 1 --data {tmp_path}/text"
    output = output_of("language_model.py", *options.split(), "--out", out)
    assert re.search(r"waited for them for .* s. Compare this with the .* s for which", output)
    assert "The model continues a text" in output
    assert (out / "metrics.png").stat().st_size > 1000
    assert (out / "model").is_dir()
    bits = [line["test_bits_per_byte"] for line in lines(out)]
    assert bits[1] < bits[0] < 8
    assert lines(out)[-1]["exchanges"] > 2 * (24 // 4 - 1)  # two fragments a period

    (first,) = (out / "checkpoints").glob("*_step_12")
    shutil.copytree(first, again / "checkpoints" / first.name)
    shutil.copy(out / "metrics.jsonl", again)
    output = output_of("language_model.py", *options.split(), "--out", again)
    assert "continues at step 12 of 24" in output
    for key in ("step", "loss", "test_bits_per_byte", "exchanges"):
        assert [line[key] for line in lines(again)] == [line[key] for line in lines(out)]


@pytest.fixture
def images():
    """The module images.py of the examples."""
    spec = importlib.util.spec_from_file_location("example_images", EXAMPLES / "images.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nodes_share_a_folder_of_images(images, tmp_path):
    for part, count in (("train", 10), ("val", 3)):
        for label in range(2):
            (tmp_path / part / f"class {label}").mkdir(parents=True)
            for i in range(count):
                gray = Image.new("L", (40, 30 + i), color=10 * (count * label + i))
                gray.save(tmp_path / part / f"class {label}" / f"{i}.png")
    train, test, num_classes, channels = images.load(tmp_path, 16)
    assert (train.size, test.size, num_classes, channels) == (20, 6, 2, 3)

    found = [list(images.batches(train, node, 2, 4, 2, 0, 0)) for node in range(2)]
    assert [len(batches) for batches in found] == [4, 4]  # 2 epochs of 2 steps
    assert found[0][0][0].shape == (4, 16, 16, 3)
    for epoch in (slice(0, 2), slice(2, 4)):  # no image twice
        colors = [int(x.max()) for batches in found for part, _ in batches[epoch] for x in part]
        assert len(set(colors)) == len(colors) == 16
    (pixels, labels), *_ = images.batches(train, 1, 2, 4, 2, 0, 3)
    np.testing.assert_array_equal(pixels, found[1][3][0])
    np.testing.assert_array_equal(labels, pixels.max(axis=(1, 2, 3)) // 100)

    tested = [labels for n in range(2) for _, labels in images.test_batches(test, n, 2, 2)]
    assert sorted(np.concatenate(tested).tolist()) == [-1, -1, 0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="data must be digits, synthetic"):
        images.load(tmp_path / "val", 16)


def test_the_record_of_other_nodes_continues_with_the_steps_of_these(tmp_path, monkeypatch):
    """Three nodes continue after two epochs of 11 steps on two nodes, and have 7 in an epoch."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    record = importlib.import_module("record")
    line = dict.fromkeys(record.TOTALS, 1.0)
    old = "".join(json.dumps({"step": step, **line}) + "\n" for step in (11, 22, 33))
    (tmp_path / "metrics.jsonl").write_text(old)
    nodes = [types.SimpleNamespace(node=node) for node in range(2)]
    own, other = (record.Record(tmp_path, node, None, 14, 1, "images", 22) for node in nodes)
    assert [line["step"] for line in lines(tmp_path)] == [7, 14]
    assert own.before["seconds"] == 1.0
    assert other.lines == []  # only the first node reads what it writes again
