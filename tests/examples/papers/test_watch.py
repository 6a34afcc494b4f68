"""The records of a training, also of one that is killed and resumed."""

import json
import sys

import jax.numpy as jnp
import pytest

pytest.importorskip("tqdm")
import watch

import jdaso

METRICS = jdaso.metrics(
    jdaso.dasgd(jdaso.single_exchange(), period=4, delay=2).init({"w": jnp.ones(3)})
)


def open_watch(out, active=True, tensorboard=False, begin=0):
    """Creates a Watch for 100 steps, with 10 steps per epoch and 10 images per step."""
    return watch.Watch(out, active, tensorboard, 10, 100, begin, begin // 10)


def line(epoch, **more):
    return {"step": 10 * epoch, "epoch": epoch, "seconds": 2.0 * epoch, **more}


def recorded(out):
    return [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]


def train(out, epochs, **options):
    """Records some epochs and does not close the file, which must have the lines all the same."""
    view = open_watch(out, **options)
    for epoch in epochs:
        view.epoch(line(epoch))
    seen = recorded(out)
    view.close()
    return seen


def test_lines_are_there_at_once(tmp_path):
    assert train(tmp_path / "new", [1, 2]) == [line(1), line(2)]


def test_a_fresh_start_begins_a_new_file(tmp_path):
    train(tmp_path, [1, 2])
    assert train(tmp_path, [1]) == [line(1)]


@pytest.mark.parametrize(("begin", "kept"), [(20, 2), (25, 2), (9, 0), (30, 3)])
def test_steps_after_the_checkpoint_are_cut_off(tmp_path, begin, kept):
    train(tmp_path, [1, 2, 3])
    view = open_watch(tmp_path, begin=begin)
    assert recorded(tmp_path) == [line(epoch) for epoch in range(1, kept + 1)]
    view.close()
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_a_half_written_line_does_not_spoil_the_next(tmp_path):
    train(tmp_path, [1])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2')
    assert train(tmp_path, [], begin=10) == [line(1)]
    view = open_watch(tmp_path, begin=10)
    view.epoch(line(2))
    view.close()
    assert recorded(tmp_path) == [line(1), line(2)]


def test_a_checkpoint_without_records_goes_on(tmp_path):
    assert train(tmp_path, [3], begin=20) == [line(3)]


def test_a_process_that_is_not_active_does_nothing(tmp_path, capsys):
    view = open_watch(tmp_path / "none", active=False, tensorboard=True)
    view.step(1, None, None, None)
    view.epoch({})
    view.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_where_training_is_and_leaves_few_lines_in_a_log(tmp_path, capsys):
    view = open_watch(tmp_path, begin=10)
    for step in range(11, 101):
        view.step(step, jnp.float32(0.25), METRICS, 0.1)
    view.close()
    shown = capsys.readouterr().err.split("\r")
    assert len(shown) < 10
    assert "10%" in shown[1]
    assert "epoch 2, loss 0.250, cycling, period 4, delay 2" in shown[-1]
    assert "1.00k/1.00k" in shown[-1]


def test_epochs_are_counted_over_restarts(tmp_path, capsys):
    train(tmp_path, [1, 2])
    view = open_watch(tmp_path, begin=20)
    view.step(21, jnp.float32(0.25), METRICS, 0.1)
    view.close()
    assert "epoch 3, " in capsys.readouterr().err


def test_tensorboard_gets_steps_and_epochs(tmp_path):
    pytest.importorskip("tensorboardX")
    view = open_watch(tmp_path, tensorboard=True)
    view.step(5, jnp.float32(0.25), METRICS, jnp.float32(0.1))
    view.epoch(line(1, test_accuracy=0.5, phase="cycling", drift=None))
    view.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    written = file.read_bytes()
    for tag in ("step/loss", "step/learning_rate", "step/in_flight", "epoch/test_accuracy"):
        assert tag.encode() in written
    for tag in ("epoch/phase", "epoch/drift"):
        assert tag.encode() not in written


def test_without_tensorboardx_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        open_watch(tmp_path, tensorboard=True)
