"""Whoever reads a folder of checkpoints changes nothing in it, and what cannot be done is said."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest

import jdaso
from jdaso import JdasoError
from jdaso.checkpoint import Checkpoints
from jdaso.checkpoint import checkpoints as module

TOPOLOGY = jdaso.discover_topology()
EXCHANGE = jdaso.single_exchange()
NOBODY = 65534


def opened(folder, **options):
    return Checkpoints(folder, TOPOLOGY, EXCHANGE, **options)


def state(step=0):
    return {"w": np.full(3, float(step))}


def fill(folder, steps, keep=10):
    checkpoints = opened(folder, keep=keep)
    for step in steps:
        checkpoints.save(step, state(step))
    checkpoints.close()


def contents(folder):
    """Names and times of everything in a folder."""
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


def test_reading_with_a_smaller_keep_deletes_nothing(tmp_path):
    fill(tmp_path, range(1, 11))
    before = contents(tmp_path)
    reader = opened(tmp_path)  # the default keep, 3
    assert reader.restore(state()).step == 10
    reader.wait()
    assert reader.restore(state()).step == 10
    reader.close()
    assert reader.steps() == list(range(1, 11))
    assert contents(tmp_path) == before


def test_an_own_save_deletes_down_to_keep(tmp_path):
    fill(tmp_path, range(1, 11))
    training = opened(tmp_path)
    training.restore(state())
    training.save(11, state(11))
    training.close()
    assert training.steps() == [9, 10, 11]


def test_a_reader_of_a_folder_that_does_not_exist_makes_none(tmp_path):
    reader = opened(tmp_path / "typo" / "run")
    assert reader.restore(state()) is None
    assert reader.steps() == []
    reader.close()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_a_training_deletes_while_it_is_read_is_no_damage(
    tmp_path, monkeypatch, caplog
):
    fill(tmp_path, [1])
    training, reader = opened(tmp_path, keep=1), opened(tmp_path)
    training.restore(state())
    original, left = module.read_part, [2, 3]

    def slow_read(*arguments):
        for step in left:
            training.save(step, state(step))
            training.wait()
        left.clear()
        return original(*arguments)

    monkeypatch.setattr(module, "read_part", slow_read)
    restored = reader.restore(state())
    assert (restored.step, restored.state["w"].tolist()) == (3, [3.0] * 3)
    assert "is skipped" not in caplog.text
    training.close()


def test_a_training_that_deletes_faster_than_a_program_reads_is_named(tmp_path, monkeypatch):
    fill(tmp_path, [1])
    training, reader = opened(tmp_path, keep=1), opened(tmp_path)
    training.restore(state())
    steps = iter(range(2, 100))
    original = module.read_part

    def slow_read(*arguments):
        step = next(steps)
        training.save(step, state(step))
        training.wait()
        return original(*arguments)

    monkeypatch.setattr(module, "read_part", slow_read)
    with pytest.raises(JdasoError, match="deletes its checkpoints while this program reads them"):
        reader.restore(state())
    training.close()


def test_a_job_that_is_killed_while_it_deletes_leaves_no_half_of_a_checkpoint(
    tmp_path, monkeypatch
):
    fill(tmp_path, [1, 2])

    def killed(path, **_):
        (Path(path) / "node_0_of_1" / "manifest.ocdbt").unlink()
        raise SystemExit

    training = opened(tmp_path, keep=1)
    training.restore(state())
    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(shutil, "rmtree", killed)
        training.save(3, state(3))
        training.wait()
    assert 1 not in opened(tmp_path).steps()
    training.save(4, state(4))
    training.close()
    assert [path.name for path in tmp_path.iterdir()] == ["000004_step_4"]  # the rest as well


@contextlib.contextmanager
def locked(mode):
    """A folder with another mode, seen by a user without rights."""
    folder = Path(tempfile.mkdtemp())  # pytest's folders are those of one user
    user = os.geteuid()
    try:
        fill(folder / "run", [1])
        folder.chmod(0o755)
        (folder / "run").chmod(mode)
        if user == 0:
            os.seteuid(NOBODY)
        yield folder / "run"
    finally:
        os.seteuid(user)
        (folder / "run").chmod(0o755)
        shutil.rmtree(folder)


def test_a_folder_without_write_permission_can_be_read_and_a_save_says_what_is_missing():
    with locked(0o555) as folder:
        checkpoints = opened(folder)
        assert checkpoints.restore(state()).step == 1
        with pytest.raises(JdasoError, match=rf"cannot write to {folder}: Permission denied"):
            checkpoints.save(2, state(2))
        with pytest.raises(JdasoError, match=rf"cannot write to {folder}/new: Permission denied"):
            opened(folder / "new").save(2, state(2))
        assert checkpoints.steps() == [1]


def test_a_folder_without_read_permission_is_named():
    with (
        locked(0o000) as folder,
        pytest.raises(JdasoError, match=r"cannot read .*/run: Perm"),
    ):
        opened(folder).restore(state())


def test_a_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(JdasoError, match=rf"cannot write to {tmp_path}/run: File exists"):
        opened(tmp_path / "run").save(1, state())
